"""How long the parts of a clean stop may take. The supervisor's patience with a process is longer than the parts of that process together.

Of what is not done in time nothing is lost but recorded traffic: clients come back for their results, and the journal makes up for a checkpoint at
the next start.
"""

from typing import Final

RUNNER_S: Final = 5.0
"""The supervisor's patience with the runner of jobs, whose processes are killed at once: their runs know what was done."""
API_S: Final = 30.0
"""The supervisor's patience with the api."""
REQUESTS_S: Final = 5
"""Streams and long polls that are open then are cut; a whole number, as uvicorn takes it."""
DRAIN_S: Final = 12.0
"""Engines checkpoint every run."""
STORED_S: Final = 4.0
"""What the engines said is journaled and in rows."""
SPANS_S: Final = 8.0
"""The recorder writes what it holds, each body synced to the disk."""

ENGINE_S: Final = 10.0
"""The supervisor's patience with an engine or a replica, which the api has drained before."""
LAST_MESSAGES_S: Final = 5.0
"""The api reads what an engine said last."""
