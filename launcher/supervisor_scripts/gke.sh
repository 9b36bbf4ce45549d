# The pod's Kubernetes service account acts as that account (Workload Identity).
# shellcheck shell=sh disable=SC2154 # supervisor_manifest.py assigns the variables
gcloud iam service-accounts add-iam-policy-binding "$account" --project="$project" \
  --member="serviceAccount:$project.svc.id.goog[default/tpu-launch-supervisor]" \
  --role=roles/iam.workloadIdentityUser --quiet
# In the cluster of kubectl's current context: one replica; the lease keeps a second one idle.
kubectl apply --filename=- <<EOF
apiVersion: v1
kind: ServiceAccount
metadata:
  name: tpu-launch-supervisor
  namespace: default
  annotations:
    iam.gke.io/gcp-service-account: "$account"
---
apiVersion: apps/v1
kind: Deployment
metadata:
  name: tpu-launch-supervisor
  namespace: default
spec:
  replicas: 1
  strategy:
    type: Recreate
  selector:
    matchLabels:
      app: tpu-launch-supervisor
  template:
    metadata:
      labels:
        app: tpu-launch-supervisor
    spec:
      serviceAccountName: tpu-launch-supervisor
      terminationGracePeriodSeconds: 30
      securityContext:
        runAsNonRoot: true
        runAsUser: 1000
        fsGroup: 1000
        seccompProfile:
          type: RuntimeDefault
      containers:
        - name: supervisor
          image: "$image"
          args:
            - supervise
            - "$folder"
          resources:
            requests:
              cpu: "250m"
              memory: "512Mi"
            limits:
              memory: "1Gi"
          securityContext:
            allowPrivilegeEscalation: false
            capabilities:
              drop:
                - ALL
            readOnlyRootFilesystem: true
          volumeMounts:
            - name: home
              mountPath: /home/launcher
            - name: tmp
              mountPath: /tmp
      # Caches and gcloud's ssh key. The ledger is in the bucket.
      volumes:
        - name: home
          emptyDir: {}
        - name: tmp
          emptyDir: {}
EOF
