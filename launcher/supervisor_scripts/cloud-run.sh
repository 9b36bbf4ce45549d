# One task of at most 168 hours; Cloud Run retries it when it fails or times out.
# shellcheck shell=sh disable=SC2154 # supervisor_manifest.py assigns the variables
gcloud run jobs deploy tpu-launch-supervisor --project="$project" --region="${zone%-*}" --image="$image" \
  --service-account="$account" --args="supervise,$folder" \
  --tasks=1 --task-timeout=168h --max-retries=10 --cpu=1 --memory=512Mi --quiet
gcloud run jobs execute tpu-launch-supervisor --project="$project" --region="${zone%-*}" --async --quiet
