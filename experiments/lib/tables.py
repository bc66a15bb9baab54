"""Markdown tables that also read well in a terminal."""


def table(header: list[str], lines: list[list[str]]) -> str:
  """Format a table with aligned columns: numbers to the right, words to the left."""
  columns = list(zip(header, *lines, strict=True))
  widths = [max(3, *map(len, column)) for column in columns]
  right = [not any(cell[:1].isalpha() or cell[:1] == "`" for cell in x[1:]) for x in columns]
  rule = ["-" * (w - 1) + (":" if r else "-") for w, r in zip(widths, right)]

  def align(cells):
    return [x.rjust(w) if r else x.ljust(w) for x, w, r in zip(cells, widths, right)]

  aligned = [align(header), rule, *map(align, lines)]
  return "".join(f"| {' | '.join(cells)} |\n" for cells in aligned)
