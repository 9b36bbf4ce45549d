"""Images in a registry, without a container engine: the OCI distribution protocol and the documents it carries.

    reference     names of images
    credentials   who we are to a registry
    transport     HTTPS connections: certificates, proxies, one answer at a time
    client        the protocol: manifests, blobs, uploads; retries
    manifest      manifests and image configurations: read, checked, extended by layers
    layer         files as layers, the same bytes every time

https://github.com/opencontainers/distribution-spec/blob/v1.1.0/spec.md
https://github.com/opencontainers/image-spec/blob/v1.1.0/spec.md
"""
