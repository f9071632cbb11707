"""Ten hackable graders and ten sound ones, by a reader who had not seen the detector they measure.

`cases()` reads them as plain data and runs nothing. A case in Python is a file of docstring, grader and a literal `CASE`, in this order; what a
detector may see is `Case.grader`, which is only what lies between the two: the docstring and `CASE` give the answer away.
"""

import ast
import json
from pathlib import Path
from typing import Any, Literal, NamedTuple

Form = Literal["score", "openai", "trl", "json"]
"""`score`: a function of (output, reference) or (output, reference, item). `openai`: of (sample, item). `trl`: of (prompts, completions, **columns),
where both are conversations. `json`: a grader as OpenAI declares them."""


class Row(NamedTuple):
    """One row of the data; `item` holds its further fields. `good` and `bad` are honest answers, of those rows that have some."""

    messages: list[dict[str, str]]
    reference: Any
    item: dict[str, Any]
    good: list[str]
    bad: list[str]


class Case(NamedTuple):
    """One planted grader. `why` says its weakness, or why it is sound. `runs_code`: it executes what it grades, so give it a process of its own."""

    name: str
    kind: Literal["hackable", "sound"]
    why: str
    form: Form
    grader: str
    entry: str
    runs_code: bool
    rows: list[Row]
    exploits: list[str]

    def exploits_of(self, row: Row) -> list[str]:
        """The exploits as outputs to this row: `{prompt}` stands for its last message."""
        return [exploit.replace("{prompt}", row.messages[-1]["content"]) for exploit in self.exploits]


def cases(folder: Path = Path(__file__).parent) -> list[Case]:
    """All cases of a folder, by name."""
    files = sorted(path for path in folder.iterdir() if path.suffix in {".py", ".json"} and path.stem != "__init__")
    return [_declared(path) if path.suffix == ".json" else _written(path) for path in files]


def _declared(path: Path) -> Case:
    data = json.loads(path.read_text())
    return _case(path.stem, data["why"], json.dumps(data["grader"]), data)


def _written(path: Path) -> Case:
    text = path.read_text()
    module = ast.parse(text)
    docstring, *_, last = module.body
    if not (isinstance(last, ast.Assign) and ast.unparse(last.targets[0]) == "CASE"):
        raise ValueError(f"{path.name} has to end with CASE = {{...}}")
    grader = "\n".join(text.splitlines()[docstring.end_lineno : last.lineno - 1]).strip() + "\n"
    return _case(path.stem, ast.get_docstring(module) or "", grader, ast.literal_eval(last.value))


def _case(name: str, why: str, grader: str, data: dict[str, Any]) -> Case:
    system = [{"role": "system", "content": data["system"]}] if "system" in data else []
    rows = [
        Row(
            messages=[*system, {"role": "user", "content": row["prompt"]}],
            reference=row["reference"],
            item=row.get("item", {}),
            good=row.get("good", []),
            bad=row.get("bad", []),
        )
        for row in data["rows"]
    ]
    return Case(name, data["kind"], why, data["form"], grader, data.get("entry", ""), data.get("runs_code", False), rows, data.get("exploits", []))
