"""GKE: manifests of a run, and the provider that runs them through kubectl. Knows nothing of what stands in for a
cluster in tests."""
