{{/*
The text of corella.toml. A text, number, switch or list is written alike in JSON and TOML. Helm's own toToml
turns the number 4096 into 4096.0, which is no number of tokens.
*/}}
{{- define "corella.toml" -}}
{{- with .Values.model -}}
model = {{ toRawJson . }}
{{ end -}}
{{- range $name, $value := .Values.config }}
{{- if not (kindIs "map" $value) }}
{{- $name }} = {{ toRawJson $value }}
{{ end }}
{{- end }}
{{- range $table, $options := .Values.config }}
{{- if kindIs "map" $options }}
{{- printf "[%s]" $table }}
{{ range $name, $value := $options }}
{{- $name }} = {{ toRawJson $value }}
{{ end }}
{{- end }}
{{- end }}
{{- end -}}
