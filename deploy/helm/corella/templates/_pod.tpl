{{/*
The template of a pod, indented by nothing. The argument has the chart's scope as `root`, and the node's `role`, or
nothing.
*/}}
{{- define "corella.pod" -}}
{{- $root := .root -}}
{{- $values := .root.Values -}}
{{- $own := dict -}}
{{- with .role }}{{ $own = index $values . }}{{ end -}}
metadata:
  annotations:
    checksum/config: {{ include "corella.toml" $root | sha256sum }}
    {{- if not $values.podMonitor.enabled }}
    prometheus.io/scrape: "true"
    prometheus.io/port: "8000"
    {{- if $values.tls.secret }}
    prometheus.io/scheme: https
    {{- end }}
    {{- end }}
    {{- with $values.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  labels:
    {{- include "corella.roleSelector" . | nindent 4 }}
    {{- with $values.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  # preStop, the time that running requests have to finish, and some time to spare.
  terminationGracePeriodSeconds: {{ add $values.drain.preStopSeconds $values.drain.timeoutSeconds 10 }}
  automountServiceAccountToken: false
  {{- with $values.podSecurityContext }}
  securityContext:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $values.image.pullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $values.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  {{- range $name := list "nodeSelector" "tolerations" "affinity" "topologySpreadConstraints" }}
  {{- with index $own $name | default (index $values $name) }}
  {{ $name }}:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- end }}
  containers:
    - name: corella
      image: {{ printf "%s:%s" $values.image.repository ($values.image.tag | default $root.Chart.AppVersion) | quote }}
      imagePullPolicy: {{ $values.image.pullPolicy }}
      args:
        - serve
        - --config
        - /etc/corella/corella.toml
        - --drain-timeout={{ $values.drain.timeoutSeconds }}
        {{- if $values.apiKeys.secret }}
        - --api-keys=/etc/corella-keys/keys.toml
        {{- end }}
        {{- if $values.tls.secret }}
        - --tls-cert=/etc/corella-tls/tls.crt
        - --tls-key=/etc/corella-tls/tls.key
        {{- end }}
        {{- if .role }}
        - --role={{ .role }}
        {{- if eq .role "prefill" }}
        # The addresses of all decode nodes, by the headless service.
        - --registry=dns:{{ include "corella.roleName" (dict "root" $root "role" "decode") }}:9000
        {{- end }}
        - --cluster-listen=0.0.0.0:9000
        - --cluster-advertise=$(POD_IP)
        {{- end }}
        {{- with concat $values.extraArgs ($own.extraArgs | default list) }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      env:
        {{- if .role }}
        - name: POD_IP
          valueFrom:
            fieldRef: { fieldPath: status.podIP }
        {{- end }}
        {{- $secret := $values.secret | default (include "corella.base" $root) }}
        - name: CORELLA_API_KEY
          valueFrom:
            secretKeyRef: { name: {{ $secret }}, key: api-key, optional: true }
        - name: HF_TOKEN
          valueFrom:
            secretKeyRef: { name: {{ $secret }}, key: hf-token, optional: true }
        {{- with $values.extraEnv }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      ports:
        - name: http
          containerPort: 8000
        {{- if .role }}
        - name: cluster
          containerPort: 9000
        {{- end }}
      {{- $paths := dict "startup" "/ready" "readiness" "/ready" "liveness" "/health" }}
      {{- range $name, $path := $paths }}
      {{ $name }}Probe:
        httpGet:
          path: {{ $path }}
          port: http
          {{- if $values.tls.secret }}
          scheme: HTTPS
          {{- end }}
        {{- with index $values.probes $name }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- end }}
      lifecycle:
        preStop:
          exec: { command: [sleep, {{ $values.drain.preStopSeconds | quote }}] }
      {{- with $own.resources | default $values.resources }}
      resources:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with $values.securityContext }}
      securityContext:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      volumeMounts:
        - { name: config, mountPath: /etc/corella, readOnly: true }
        {{- if $values.apiKeys.secret }}
        - { name: keys, mountPath: /etc/corella-keys, readOnly: true }
        {{- end }}
        {{- if $values.tls.secret }}
        - { name: tls, mountPath: /etc/corella-tls, readOnly: true }
        {{- end }}
        - { name: cache, mountPath: /cache }
        - { name: tmp, mountPath: /tmp }
        {{- with $values.extraVolumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
  volumes:
    - name: config
      configMap: { name: {{ include "corella.base" $root }} }
    {{- with $values.apiKeys.secret }}
    - name: keys
      secret: { secretName: {{ . }} }
    {{- end }}
    {{- with $values.tls.secret }}
    - name: tls
      secret: { secretName: {{ . }} }
    {{- end }}
    - name: cache
      {{- if and $values.persistence.enabled $values.persistence.existingClaim }}
      persistentVolumeClaim: { claimName: {{ $values.persistence.existingClaim }} }
      {{- else if and $values.persistence.enabled (not .role) }}
      persistentVolumeClaim: { claimName: {{ include "corella.base" $root }}-cache }
      {{- else }}
      emptyDir: { sizeLimit: {{ $values.persistence.size }} }
      {{- end }}
    - name: tmp
      emptyDir: { sizeLimit: 1Gi }
    {{- with $values.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}
