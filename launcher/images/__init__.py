"""Content-addressed images: `specification` (what one is built from, and its tag), `build` (makes what is missing),
`local` (the image of a configuration, and commands in it on this machine), `appended` (makes one in the registry, of
`layers`, without an engine), `registry` (the protocol), `repositories` (names and credentials)."""
