from bloomery.config import DEFAULT_CHECKPOINT_S
from bloomery.up.checkpoints import BYTES, SECONDS, checkpoints_after


def test_checkpoints_come_as_usual_unless_the_environment_says_otherwise() -> None:
    assert checkpoints_after({}) == (DEFAULT_CHECKPOINT_S, None)
    assert checkpoints_after({SECONDS: "0.02"}) == (0.02, None)
    assert checkpoints_after({SECONDS: "0", BYTES: "3072"}) == (0.0, 3072)
    assert isinstance(checkpoints_after({BYTES: "3072"}).bytes, int)
