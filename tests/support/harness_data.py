"""Small data files in the formats of the evaluation harness's tasks."""

import json
import pathlib

_ARC = dict(choices=dict(text=["ice", "steam", "sand", "glass"], label=["A", "B", "C", "D"]))
_RECALL = [
  dict(text="Name: Emma\nColour: blue\nCity: Bath\n\nColour:", value="blue"),
  dict(text="Name: Anne\nColour: red\nCity: Lyme\n\nCity:", value="Lyme"),
]
DATA: dict[str, list[dict]] = {
  "wikitext": [dict(page=" = Bath = \n\n Bath is a city , and it has a river . \n " * 3)],
  "lambada_openai": [
    dict(text="She opened the door and called the dog, and in came the dog"),
    dict(text="He took the bread from the oven and ate the bread"),
  ],
  "piqa": [
    dict(goal="Cool a drink.", sol1="Add ice to it.", sol2="Add sand to it.", label=0),
    dict(goal="Open a door.", sol1="Eat the handle.", sol2="Turn the handle.", label=1),
  ],
  "hellaswag": [
    dict(
      activity_label="Washing",
      ctx_a="A man fills a sink.",
      ctx_b="he",
      endings=["washes a plate.", "eats the sink.", "flies away.", "is a plate."],
      label="0",
    )
  ],
  "winogrande": [
    dict(
      sentence="The cup did not fit in the box because the _ was too large.",
      option1="cup",
      option2="box",
      answer="1",
    )
  ],
  "arc_easy": [dict(question="What is frozen water?", answerKey="A", **_ARC)],
  "arc_challenge": [dict(question="What is boiling water?", answerKey="B", **_ARC)],
  "openbookqa": [dict(question_stem="Water that is very cold becomes", answerKey="A", **_ARC)],
  "mmlu": [
    dict(question="2 + 2?", subject="abstract_algebra", choices=["1", "2", "3", "4"], answer=3),
    dict(question="A bone?", subject="anatomy", choices=["ulna", "oak", "tin", "sea"], answer=0),
    dict(question="A joint?", subject="anatomy", choices=["sky", "knee", "fog", "ash"], answer=1),
  ],
  "social_iqa": [
    dict(
      context="Anne gave Emma a book.",
      question="How would Emma feel?",
      answerA="thankful",
      answerB="hungry",
      answerC="cold",
      label="1",
    )
  ],
  "boolq": [dict(passage="Bath is a city.", question="is bath a city", label=1)],
  "swde": _RECALL,
  "squad_completion": _RECALL,
  "fda": _RECALL,
}


def write(folder: pathlib.Path):
  """Write one file per task."""
  folder.mkdir(parents=True, exist_ok=True)
  for name, examples in DATA.items():
    lines = (json.dumps(example) + "\n" for example in examples)
    (folder / f"{name}.jsonl").write_text("".join(lines))
