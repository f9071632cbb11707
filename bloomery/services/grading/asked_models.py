"""Every model that a caller may ask, by one name each: those of this server, and `ENDPOINT:MODEL` elsewhere."""

from collections.abc import Sequence

from bloomery.grade.models import Answer, Question, Vectors
from bloomery.services.access.principal import Principal
from bloomery.services.grading.endpoints import Endpoints, is_elsewhere
from bloomery.services.grading.own_models import OwnModels, Served


class AskedModels:
    """On the account of one caller."""

    def __init__(self, served: Served, endpoints: Endpoints, p: Principal) -> None:
        self._own, self._endpoints, self._p = OwnModels(served, p), endpoints, p

    async def ask(self, question: Question) -> Answer:
        """One answer of the form that is asked for."""
        if is_elsewhere(question.model):
            return await self._endpoints.named(self._p, question.model).ask(question)
        return await self._own.ask(question)

    async def embed(self, model: str, texts: Sequence[str]) -> Vectors:
        """A vector for each text."""
        if is_elsewhere(model):
            return await self._endpoints.named(self._p, model).embed(texts)
        return await self._own.embed(model, texts)
