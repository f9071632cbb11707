"""The disk: `durable` has files and directories survive a power cut; standard library only."""
