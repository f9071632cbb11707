"""An engine process whose device is not there: `python -m tests.devices.engine CONFIG.json`."""

from bloomery.engine.__main__ import main
from tests.elsewhere import pretend

if __name__ == "__main__":
    pretend()
    main()
