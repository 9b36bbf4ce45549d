# The VM's container engine reads the image with the account's rights. $repository: "" outside Artifact Registry.
# shellcheck shell=sh disable=SC2154 # supervisor_manifest.py assigns the variables
[ -z "$repository" ] ||
  gcloud artifacts repositories add-iam-policy-binding "$repository" --project="$repository_project" \
    --location="$location" --member="serviceAccount:$account" --role=roles/artifactregistry.reader --quiet
# Container-Optimized OS starts the container, and restarts it when it exits and after a reboot.
settings=$(mktemp)
cat >"$settings" <<EOF
#cloud-config
write_files:
- path: /etc/systemd/system/tpu-launch-supervisor.service
  content: |
    [Unit]
    Wants=docker.service network-online.target
    After=docker.service network-online.target
    [Service]
    Environment=HOME=/home/tpu-launch-supervisor
    ExecStartPre=/usr/bin/docker-credential-gcr configure-docker --registries=${image%%/*}
    ExecStartPre=-/usr/bin/docker rm --force tpu-launch-supervisor
    ExecStart=/usr/bin/docker run --rm --init --name=tpu-launch-supervisor --network=host $image supervise $folder
    ExecStop=/usr/bin/docker stop --time=30 tpu-launch-supervisor
    Restart=always
    RestartSec=10
runcmd:
- systemctl daemon-reload
- systemctl start tpu-launch-supervisor.service
EOF
gcloud compute instances create tpu-launch-supervisor --project="$project" --zone="$zone" \
  --machine-type=e2-micro --image-family=cos-stable --image-project=cos-cloud \
  --boot-disk-size=10GB --boot-disk-type=pd-standard --service-account="$account" \
  --scopes=cloud-platform --metadata-from-file=user-data="$settings" --quiet
rm "$settings"
