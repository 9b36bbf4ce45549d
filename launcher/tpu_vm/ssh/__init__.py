"""Commands on the hosts of a slice: `connections` finds the hosts (`addresses`) and falls back to gcloud, `pool` keeps
ssh connections open."""
