"""Whose turn it is: projects rotate, and in each its runs, so that a project with many runs gets no more turns than one with a single run."""

from collections.abc import Callable, Iterator
from itertools import zip_longest


class Turns:
    """Runs in the order of their turns. Whoever had one goes behind the other runs of its project, and the project behind all others."""

    def __init__(self) -> None:
        self._projects: dict[str, list[str]] = {}
        """Their runs; both in the order of turns, which for projects is that of the keys."""
        self._project_of: dict[str, str] = {}

    def join(self, run_id: str, project: str) -> None:
        """A run is there, which was not: last of its project."""
        self._project_of[run_id] = project
        self._projects.setdefault(project, []).append(run_id)

    def leave(self, run_id: str) -> None:
        """A run is there no more."""
        project = self._project_of.pop(run_id)
        self._projects[project].remove(run_id)
        if not self._projects[project]:
            del self._projects[project]

    def among(self, has_work: Callable[[str], bool]) -> Iterator[str]:
        """The runs that have work, in the order of their turns: the first of every project, then the second.

        Who has none is not counted: behind an idle one of its own project a run would wait for those of all others, for ever.
        """
        for turn in zip_longest(*([run_id for run_id in runs if has_work(run_id)] for runs in self._projects.values())):
            yield from (run_id for run_id in turn if run_id is not None)

    def had(self, run_id: str) -> None:
        """It had its turn."""
        project = self._project_of[run_id]
        runs = self._projects.pop(project)
        runs.remove(run_id)
        self._projects[project] = [*runs, run_id]
