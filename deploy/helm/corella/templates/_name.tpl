{{/* The beginning of all names. 50 characters leave room for what controllers append. */}}
{{- define "corella.base" -}}
{{- $default := .Release.Name -}}
{{- if not (contains .Chart.Name .Release.Name) -}}
{{- $default = printf "%s-%s" .Release.Name .Chart.Name -}}
{{- end -}}
{{- .Values.fullnameOverride | default $default | trunc 50 | trimSuffix "-" -}}
{{- end -}}

{{- define "corella.name" -}}
{{- include "corella.base" . -}}
{{- if eq .Values.mode "pair" }}-pair{{ end -}}
{{- end -}}

{{/* LeaderWorkerSet makes a headless service with the pair's own name. */}}
{{- define "corella.service" -}}
{{- include "corella.name" . -}}
{{- if eq .Values.mode "pair" }}-api{{ end -}}
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
{{- if eq .Values.mode "pair" }}
corella/role: prefill
{{- end }}
{{- end -}}

{{- define "corella.labels" -}}
{{ include "corella.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}
