"""Whether the devices of every host work, tried by a container on each: run, then judged."""
