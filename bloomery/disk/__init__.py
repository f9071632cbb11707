"""The disk: `durable` has files and directories survive a power cut, `mapped` has files stand in for memory; standard library only."""
