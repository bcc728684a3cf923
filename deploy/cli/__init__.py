"""The stagespec command, one file a subcommand."""
