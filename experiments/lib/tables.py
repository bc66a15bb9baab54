"""Tables of text that read well in a terminal and as Markdown."""


def table(header: list[str], lines: list[list[str]]) -> str:
  """Cells in columns of one width, numbers to the right and words to the left."""
  columns = list(zip(header, *lines, strict=True))
  widths = [max(3, *map(len, column)) for column in columns]
  right = [not any(cell[:1].isalpha() or cell[:1] == "`" for cell in x[1:]) for x in columns]
  rule = ["-" * (w - 1) + (":" if r else "-") for w, r in zip(widths, right)]

  def show(cells):
    return [x.rjust(w) if r else x.ljust(w) for x, w, r in zip(cells, widths, right)]

  shown = [show(header), rule, *map(show, lines)]
  return "".join(f"| {' | '.join(cells)} |\n" for cells in shown)
