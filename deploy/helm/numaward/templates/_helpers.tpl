{{/* The label `app.kubernetes.io/name`. */}}
{{- define "numaward.label" -}}
{{ .Values.nameOverride | default "numaward" | trunc 63 | trimSuffix "-" }}
{{- end }}

{{/* The name of everything: of the release, so that a cluster may have several for different nodes. */}}
{{- define "numaward.name" -}}
{{- $label := include "numaward.label" . -}}
{{- if .Values.fullnameOverride -}}
{{ .Values.fullnameOverride | trunc 63 | trimSuffix "-" }}
{{- else if contains $label .Release.Name -}}
{{ .Release.Name | trunc 63 | trimSuffix "-" }}
{{- else -}}
{{ printf "%s-%s" .Release.Name $label | trunc 63 | trimSuffix "-" }}
{{- end -}}
{{- end }}

{{- define "numaward.serviceAccount" -}}
{{ .Values.serviceAccount.name | default (ternary (include "numaward.name" .) "default" .Values.serviceAccount.create) }}
{{- end }}

{{- define "numaward.selector" -}}
app.kubernetes.io/name: {{ include "numaward.label" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "numaward.labels" -}}
{{ include "numaward.selector" . }}
app.kubernetes.io/part-of: numaward
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "numaward.metadata" -}}
name: {{ include "numaward.name" . }}
labels: {{- include "numaward.labels" . | nindent 2 }}
{{- end }}

{{/* The subject of every binding. */}}
{{- define "numaward.subjects" -}}
- kind: ServiceAccount
  name: {{ include "numaward.serviceAccount" . }}
  namespace: {{ .Release.Namespace }}
{{- end }}

{{/* An image by its repository, tag and digest: (list root image default-tag). */}}
{{- define "numaward.image" -}}
{{- $root := index . 0 -}}
{{- $image := index . 1 -}}
{{- $registry := $root.Values.global.imageRegistry | default $image.registry -}}
{{ with $registry }}{{ trimSuffix "/" . }}/{{ end }}{{ $image.repository }}:{{ $image.tag | default (index . 2) }}{{ with $image.digest }}@{{ . }}{{ end }}
{{- end }}

{{- define "numaward.pullSecrets" -}}
{{- with concat (.Values.global.imagePullSecrets | default list) .Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* Fails where the cluster does not have an API: (list root API value). */}}
{{- define "numaward.requires" -}}
{{- $root := index . 0 -}}
{{- if and $root.Values.checkCapabilities (not ($root.Capabilities.APIVersions.Has (index . 1))) -}}
{{- fail (printf "%s needs %s, which this cluster does not have. Install it first; or set checkCapabilities=false, where the chart is rendered without a cluster" (index . 2) (index . 1)) -}}
{{- end -}}
{{- end }}

{{/* Not empty if the cluster can hold each daemon to its own node. */}}
{{- define "numaward.ownNode" -}}
{{- if and .Values.ownNode.enabled (semverCompare ">=1.30.0-0" .Capabilities.KubeVersion.Version) -}}true{{- end -}}
{{- end }}

{{- define "numaward.namespaced" -}}
{{ include "numaward.metadata" . }}
namespace: {{ .Release.Namespace }}
{{- end }}

{{/* The configuration of the mode, and on top of it that of the values. */}}
{{- define "numaward.config" -}}
{{- $mode := .Files.Get (printf "files/%s.yaml" .Values.mode) | fromYaml -}}
{{ mergeOverwrite $mode .Values.config | toYaml }}
{{- end }}

{{/* Not empty where knobs may be written. */}}
{{- define "numaward.enforces" -}}
{{- if has .Values.mode (list "enforce" "migrate") }}true{{ end -}}
{{- end }}

{{/* What is installed under the names of this release, as JSON. Its fields are empty where Helm renders without a cluster. */}}
{{- define "numaward.installed" -}}
{{- $name := include "numaward.name" . -}}
{{- $set := lookup "apps/v1" "DaemonSet" .Release.Namespace $name -}}
{{- $config := lookup "v1" "ConfigMap" .Release.Namespace $name -}}
{{ dict "set" $set "config" $config | toJson }}
{{- end }}

{{/* Fails where installed daemons may hold guarantees that those of the new mode, which mount cgroups read-only, cannot give back. */}}
{{- define "numaward.checkModeChange" -}}
{{- if not (or (include "numaward.enforces" .) .Values.abandonGuarantees) -}}
{{- $installed := include "numaward.installed" . | fromJson -}}
{{- $writes := false -}}
{{- range dig "spec" "template" "spec" "containers" (list) $installed.set -}}
{{- range .volumeMounts -}}
{{- if and (eq .mountPath "/sys/fs/cgroup") (not .readOnly) }}{{ $writes = true }}{{ end -}}
{{- end -}}
{{- end -}}
{{/* They have given everything back if all of them have started with `enforcement.mode: off`. */}}
{{- $isOff := false -}}
{{- range $file, $text := dig "data" (dict) $installed.config -}}
{{- if eq $file "config.yaml" }}{{ $isOff = eq "off" (dig "enforcement" "mode" "" (fromYaml $text)) }}{{ end -}}
{{- end -}}
{{- range $file, $text := dig "data" (dict) $installed.config -}}
{{- if ne "off" (dig "enforcement" "mode" "off" (fromYaml $text)) }}{{ $isOff = false }}{{ end -}}
{{- end -}}
{{- $status := dig "status" (dict) $installed.set -}}
{{- $wanted := dig "desiredNumberScheduled" 0 $status | int -}}
{{- range list "updatedNumberScheduled" "numberReady" -}}
{{- if ne $wanted (dig . 0 $status | int) }}{{ $isOff = false }}{{ end -}}
{{- end -}}
{{- if ne (dig "metadata" "generation" 0 $installed.set | int) (dig "observedGeneration" 0 $status | int) }}{{ $isOff = false }}{{ end -}}
{{- if and $writes (not $isOff) -}}
{{- fail (printf "mode=%s cannot restore what the installed daemons have written: confined pods would stay confined. First upgrade with the present mode and config.enforcement.mode=off, and wait for `kubectl -n %s rollout status daemonset/%s`. Then change the mode, without config.enforcement.mode. Or set abandonGuarantees=true, and restart the hosts" .Values.mode .Release.Namespace (include "numaward.name" .)) -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* The account of the hooks: with serviceAccount.create=false, the existing one. */}}
{{- define "numaward.hooksAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{ include "numaward.name" . }}-hooks
{{- else -}}
{{ include "numaward.serviceAccount" . }}
{{- end -}}
{{- end }}

{{/* Not empty where the port for metrics has TLS. */}}
{{- define "numaward.tls" -}}
{{ dig "listenTls" "certFile" "" (include "numaward.config" . | fromYaml) }}
{{- end }}

{{- define "numaward.capabilities" -}}
{{- $enforces := include "numaward.enforces" . -}}
- BPF
- PERFMON
{{- if $enforces }}
- SYS_ADMIN
- DAC_OVERRIDE
- SYS_NICE
{{- else }}
- DAC_READ_SEARCH
{{- end }}
{{- $acts := or .Values.guardEvict.enabled (has (dig "guard" "report" .Values.config) (list "act" "evict")) }}
{{- if and $enforces $acts (not (has "SYS_PTRACE" .Values.extraCapabilities)) }}
- SYS_PTRACE
{{- end }}
{{- with .Values.extraCapabilities }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* These labels do not match the selector of the DaemonSet, so pods of hooks are not scraped. */}}
{{- define "numaward.hookLabels" -}}
app.kubernetes.io/name: {{ include "numaward.label" . }}-hooks
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/part-of: numaward
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* The annotations of a hook: (list events weight). */}}
{{- define "numaward.hook" -}}
helm.sh/hook: {{ index . 0 }}
helm.sh/hook-weight: {{ index . 1 | quote }}
helm.sh/hook-delete-policy: before-hook-creation,hook-succeeded
{{- end }}

{{- define "numaward.hookPod" -}}
serviceAccountName: {{ include "numaward.hooksAccount" . }}
{{- with include "numaward.pullSecrets" . }}
{{- . }}
{{- end }}
restartPolicy: Never
enableServiceLinks: false
{{- with .Values.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
# Nodes of all kinds, but none that cannot be reached: their taints have the effect NoExecute as well.
tolerations:
  - { operator: Exists, effect: NoSchedule }
{{- range .Values.tolerations }}
{{- if .key }}
  - {{- toYaml . | nindent 4 }}
{{- end }}
{{- end }}
nodeSelector:
  kubernetes.io/os: linux
securityContext:
  runAsNonRoot: true
  runAsUser: 65532
  seccompProfile: { type: RuntimeDefault }
{{- end }}

{{- define "numaward.hookContainer" -}}
image: {{ include "numaward.image" (list . .Values.kubectl.image "") }}
imagePullPolicy: {{ .Values.kubectl.image.pullPolicy }}
command: [kubectl]
resources:
  requests: { cpu: 10m, memory: 32Mi }
  limits: { memory: 128Mi }
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: { drop: [ALL] }
{{- end }}
