"""Chains of jobs as a file has them."""

from copy import deepcopy
from typing import Any, Final

from bloomery.types.errors import InvalidInput

STAGES: Final = "stages"
"""The field of a file that makes it a chain's."""


def stages_of(given: dict[str, Any]) -> list[dict[str, Any]]:
    """The stages of a chain: what stands beside them holds for each, and each begins where the one before it ends unless it says more of that."""
    shared = {field: value for field, value in given.items() if field not in (STAGES, "name", "begin")}
    asked = given[STAGES]
    if not isinstance(asked, list) or not all(isinstance(stage, dict) for stage in asked):
        raise InvalidInput(f"`{STAGES}` is a list of specs, one below the other", field=STAGES)
    if "name" in given and all("name" in stage for stage in asked):
        raise InvalidInput(f"every stage has a `name`, and `{given['name']}` is nobody's: leave it out, or have a stage without one", field="name")
    if "begin" in given and asked and "begin" in asked[0]:
        raise InvalidInput("the first stage says itself where it begins: leave out `begin` there, or beside the stages", field="begin")
    stages: list[dict[str, Any]] = []
    for number, stage in enumerate(asked, start=1):
        spec = deepcopy(shared) | stage
        if "name" not in spec:
            if "name" not in given:
                raise InvalidInput(f"stage {number} has no `name`, and neither has the chain: name one of them", field="name")
            spec["name"] = f"{given['name']}-{number}"
        begin = spec.get("begin") or {}
        if not isinstance(begin, dict):
            raise InvalidInput(f"stage {number}: `begin` has fields, as in `begin: {{job: {begin}}}`", field=f"{STAGES}.{number - 1}.begin")
        if stages:
            spec["begin"] = {"job": stages[-1]["name"]} | begin
        elif "begin" in given:
            spec.setdefault("begin", given["begin"])
        stages.append(spec)
    return stages
