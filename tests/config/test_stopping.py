from bloomery.config import stopping


def test_the_parts_of_a_clean_stop_end_before_the_supervisor_kills() -> None:
    """With a second left for what has no deadline of its own: closing files and links."""
    assert stopping.REQUESTS_S + stopping.DRAIN_S + stopping.STORED_S + stopping.SPANS_S + 1 <= stopping.API_S
    assert stopping.LAST_MESSAGES_S + 1 <= stopping.ENGINE_S
