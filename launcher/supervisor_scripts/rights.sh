# A service account that may manage slices, use the bucket, and act as the slices' own account.
# shellcheck shell=sh disable=SC2154 # supervisor_manifest.py assigns the variables
gcloud iam service-accounts describe "$account" --project="$project" --quiet >/dev/null 2>&1 ||
  gcloud iam service-accounts create tpu-launch-supervisor --project="$project" --quiet
# What `gcloud compute tpus` needs to create, find, delete and enter slices. Entering adds a key to the node's metadata
# (tpu.nodes.update) and reads the project's (compute.projects.get).
permissions=tpu.nodes.create,tpu.nodes.delete,tpu.nodes.get,tpu.nodes.list,tpu.nodes.update
permissions=$permissions,tpu.locations.get,tpu.locations.list,tpu.operations.get,tpu.operations.list
gcloud iam roles describe tpuLaunchSupervisor --project="$project" --quiet >/dev/null 2>&1 ||
  gcloud iam roles create tpuLaunchSupervisor --project="$project" --title='tpu-launch supervisor' --stage=GA \
    --permissions="$permissions,compute.projects.get" --quiet
gcloud projects add-iam-policy-binding "$project" --member="serviceAccount:$account" \
  --role="projects/$project/roles/tpuLaunchSupervisor" --condition=None --quiet
gcloud storage buckets add-iam-policy-binding "$bucket" --member="serviceAccount:$account" \
  --role=roles/storage.objectUser --quiet
# The slices' account: Compute Engine's default, unless slice.service_account names another.
number=$(gcloud projects describe "$project" --format='value(projectNumber)' --quiet)
gcloud iam service-accounts add-iam-policy-binding "$number-compute@developer.gserviceaccount.com" \
  --project="$project" --member="serviceAccount:$account" --role=roles/iam.serviceAccountUser --quiet
