{{/* Refuses values that do not go together, which the schema cannot say. */}}
{{- define "corella.refusal" -}}
{{- range $table := list .Values.config (.Values.config.serve | default dict) }}
{{- if hasKey $table "model" }}
{{- fail "config names a model: set the value `model` instead" }}
{{- end }}
{{- if hasKey $table "port" }}
{{- fail "config names a port: the container listens on 8000, and `service.port` is what clients reach" }}
{{- end }}
{{- end }}
{{- if and .Values.ingress.enabled .Values.ingress.tlsSecret (not .Values.ingress.host) }}
{{- fail "ingress.tlsSecret needs ingress.host" }}
{{- end }}
{{- with .Values.autoscaling }}
{{- if and .enabled (gt (int .minReplicas) (int .maxReplicas)) }}
{{- fail "autoscaling.minReplicas is larger than autoscaling.maxReplicas" }}
{{- end }}
{{- end }}
{{- if and (eq .Values.mode "disaggregated") (ne (int .Values.replicas) 1) }}
{{- fail "replicas is the number of servers: prefill.replicas and decode.replicas are those of the roles" }}
{{- end }}
{{- $several := or .Values.autoscaling.enabled (gt (int .Values.replicas) 1) }}
{{- with .Values.persistence }}
{{- $own := and .enabled (not .existingClaim) (eq $.Values.mode "server") }}
{{- if and $several $own (not (has "ReadWriteMany" .accessModes)) }}
{{- fail "persistence.accessModes: several servers share the cache; set it to [ReadWriteMany], or persistence.enabled to false" }}
{{- end }}
{{- end }}
{{- end -}}
