{{/* The beginning of all names. 50 characters leave room for what controllers append. */}}
{{- define "corella.base" -}}
{{- $default := .Release.Name -}}
{{- if not (contains .Chart.Name .Release.Name) -}}
{{- $default = printf "%s-%s" .Release.Name .Chart.Name -}}
{{- end -}}
{{- .Values.fullnameOverride | default $default | trunc 50 | trimSuffix "-" -}}
{{- end -}}

{{/* The name of what belongs to one role; the argument has the chart's scope as `root`, and the `role` or nothing. */}}
{{- define "corella.roleName" -}}
{{- include "corella.base" .root -}}
{{- with .role }}-{{ . }}{{ end -}}
{{- end -}}

{{/* The kinds of pods: one without a role, or one for each role. */}}
{{- define "corella.roles" -}}
{{- ternary "prefill decode" "" (eq .Values.mode "disaggregated") -}}
{{- end -}}

{{- define "corella.servicePort" -}}
{{- .Values.service.port | default (ternary 443 80 (not (empty .Values.tls.secret))) -}}
{{- end -}}

{{- define "corella.scheme" -}}
{{- ternary "https" "http" (not (empty .Values.tls.secret)) -}}
{{- end -}}

{{- define "corella.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{/* Pods that clients reach. */}}
{{- define "corella.front" -}}
{{ include "corella.selector" . }}
{{- if eq .Values.mode "disaggregated" }}
corella/role: prefill
{{- end }}
{{- end -}}

{{/* Pods of one role. */}}
{{- define "corella.roleSelector" -}}
{{ include "corella.selector" .root }}
{{- with .role }}
corella/role: {{ . }}
{{- end }}
{{- end -}}

{{- define "corella.labels" -}}
{{ include "corella.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}
