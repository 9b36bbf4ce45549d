"""Content-addressed images: `specification` (what one is built from, and its tag), `plan` (what is missing), `build`
(makes it), `local` (the image of a configuration, and commands in it on this machine); `appended` makes one in the
registry without an engine."""
