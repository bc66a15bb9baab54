"""Tables of text that read well in a terminal and as Markdown."""


def table(header: list[str], lines: list[list[str]]) -> str:
  """Cells in columns of one width; the first is aligned to the left, the others to the right."""
  widths = [max(map(len, column)) for column in zip(header, *lines, strict=True)]
  rule = ["-" * max(widths[0], 3), *("-" * (max(w, 3) - 1) + ":" for w in widths[1:])]

  def show(cells):
    first, *rest = (max(w, 3) for w in widths)
    return [cells[0].ljust(first), *(cell.rjust(w) for cell, w in zip(cells[1:], rest))]

  shown = [show(header), rule, *map(show, lines)]
  return "".join(f"| {' | '.join(cells)} |\n" for cells in shown)
