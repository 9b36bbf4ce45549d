"""The launcher's part of the run's YAML file: where to run, in which image, how.

`load` returns frozen sections; every mistake is named with file:line before anything is created. The trainer's part of
the same file is validated by `training.config`, so that a wrong learning rate is found on the workstation too. The
docstrings of the fields (`sections`, `gke`) are the reference of the keys (docs/). `values` has the types of single
values, `refused` what a file may not say.
"""

from launcher.config.loading import CONFIG_FILE, TRAINER_SECTIONS, Config, load, restore
from launcher.config.sections import Root, SliceSection
from launcher.config.values import IMAGE_BY_DIGEST, ZONE

__all__ = [
    "CONFIG_FILE",
    "IMAGE_BY_DIGEST",
    "TRAINER_SECTIONS",
    "ZONE",
    "Config",
    "Root",
    "SliceSection",
    "load",
    "restore",
]
