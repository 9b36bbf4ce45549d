"""The launcher's part of the run's YAML file: where to run, in which image, how.

`load` returns frozen sections, or names every mistake with file:line before anything is created. `training.config`
validates the trainer's part of the same file, so that a wrong learning rate is found on the workstation too. The
docstrings of the fields (`sections`) are the reference of the keys in docs/.
"""

from launcher.config.loading import CONFIG_FILE, TRAINER_SECTIONS, Candidate, Config, load, restore
from launcher.config.sections import IMAGE_BY_DIGEST, Root

__all__ = ["CONFIG_FILE", "IMAGE_BY_DIGEST", "TRAINER_SECTIONS", "Candidate", "Config", "Root", "load", "restore"]
