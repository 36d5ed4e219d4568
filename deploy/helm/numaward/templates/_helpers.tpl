{{/* The name of everything: of the release, so that a cluster may have several for different nodes. */}}
{{- define "numaward.name" -}}
{{- if contains "numaward" .Release.Name -}}
{{ .Release.Name | trunc 63 | trimSuffix "-" }}
{{- else -}}
{{ printf "%s-numaward" .Release.Name | trunc 63 | trimSuffix "-" }}
{{- end -}}
{{- end }}

{{- define "numaward.selector" -}}
app.kubernetes.io/name: numaward
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "numaward.labels" -}}
{{ include "numaward.selector" . }}
app.kubernetes.io/part-of: numaward
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "numaward.metadata" -}}
name: {{ include "numaward.name" . }}
labels: {{- include "numaward.labels" . | nindent 2 }}
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
