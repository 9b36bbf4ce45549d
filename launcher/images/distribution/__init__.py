"""The OCI distribution protocol, by which images are read and made in a registry without a container engine.

https://github.com/opencontainers/distribution-spec/blob/v1.1.0/spec.md
https://github.com/opencontainers/image-spec/blob/v1.1.0/spec.md
"""
