"""Content-addressed images: `specification` (what one is built from, and its tag), `plan` (what is missing), `build`
(makes it), `local` (the image that a configuration means, and commands in it on this machine); below them the build
context, the engine, its store and the registry."""
