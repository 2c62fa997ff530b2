{{- define "labels" -}}
app.kubernetes.io/name: lora-server
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- define "selector" -}}
app.kubernetes.io/name: lora-server
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- /* the ports of lora_server/ports.py: data of every shard, then orders of every stage */}}
{{- define "shards" -}}
{{- mul (regexReplaceAll "^ep(\\d+)-pp\\d+$" .Values.layout "${1}") (include "stages" .) -}}
{{- end }}
{{- define "stages" -}}
{{- regexReplaceAll "^ep\\d+-pp(\\d+)$" .Values.layout "${1}" -}}
{{- end }}

{{- define "probe" -}}
httpGet: {path: {{ .path }}, port: http, scheme: {{ if .Values.tls.secret }}HTTPS{{ else }}HTTP{{ end }}}
periodSeconds: 5
timeoutSeconds: 5
{{- end }}

{{- /* the addresses of both controllers, the same text everywhere */}}
{{- define "controllers" -}}
{{- $name := .Release.Name }}{{ $port := .Values.ports.control -}}
{{ $name }}-0.{{ $name }}.{{ .Release.Namespace }}:{{ $port }},{{ $name }}-standby.{{ .Release.Namespace }}:{{ $port }}
{{- end }}

{{- /* a pod; "leader": whether it has a controller, "standby": whether that is all that it has */}}
{{- define "pod" -}}
metadata:
  labels: {{- include "labels" . | nindent 4 }}
    app.kubernetes.io/component: {{ if .standby }}standby{{ else if .leader }}controller{{ else }}node{{ end }}
spec:
  automountServiceAccountToken: false
  enableServiceLinks: false  # else variables named after Services, LORA_SERVER_*, would pass for settings
  terminationGracePeriodSeconds: 60
  {{- with .Values.imagePullSecrets }}
  imagePullSecrets: {{- toYaml . | nindent 4 }}
  {{- end }}
  securityContext:
    runAsNonRoot: true
    runAsUser: 10001
    runAsGroup: 10001
    fsGroup: 10001
    seccompProfile: {type: RuntimeDefault}
  containers:
    - name: lora-server
      image: "{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}"
      imagePullPolicy: {{ .Values.image.pullPolicy }}
      env:
        - name: POD_IP
          valueFrom: {fieldRef: {fieldPath: status.podIP}}
        {{- if and .leader .Values.standby.enabled }}
        - name: LORA_SERVER_REGISTRY
          valueFrom: {secretKeyRef: {name: {{ .Values.standby.registrySecret }}, key: url}}
        {{- end }}
      command: [lora-server, serve]
      args:
        - --base-model={{ .Values.model.preset | default "/model" }}
        - --layout={{ .Values.layout }}
        - --device={{ .Values.device }}
        {{- if .standby }}
        - --nodes={{ .Values.nodes }}
        - --standby
        {{- else }}
        - --nodes=$(LWS_GROUP_SIZE)
        - --node-rank=$(LWS_WORKER_INDEX)
        {{- end }}
        {{- if .leader }}
        - --listen=0.0.0.0:{{ .Values.ports.control }}
        {{- if .Values.adaptersClaim }}
        - --adapters=/adapters
        - --watch
        {{- end }}
        {{- end }}
        {{- if .Values.standby.enabled }}
        - --controller={{ include "controllers" . }}
        {{- else if not .leader }}
        - --controller=$(LWS_LEADER_ADDRESS):{{ .Values.ports.control }}
        {{- end }}
        - --http=0.0.0.0:{{ .Values.ports.http }}
        - --advertise=$(POD_IP)
        - --data-port-base={{ .Values.ports.data }}
        - --data-dir=/var/lib/lora-server
        - --log-format=json
        {{- if .Values.insecure }}
        - --insecure
        {{- else }}
        - --require-tokens
        {{- end }}
        {{- if .Values.tls.secret }}
        - --tls-cert=/tls/tls.crt
        - --tls-key=/tls/tls.key
        - --tls-ca=/tls/ca.crt
        {{- with .Values.tls.name }}
        - --tls-name={{ . }}
        {{- end }}
        {{- end }}
        {{- if .Values.joinTokenSecret }}
        - --join-token-file=/join/token
        {{- end }}
        {{- range .Values.extraArgs }}
        - {{ . | quote }}
        {{- end }}
      ports:
        {{- if .leader }}
        - {name: control, containerPort: {{ .Values.ports.control }}}
        {{- end }}
        - {name: http, containerPort: {{ .Values.ports.http }}}
      startupProbe: {{- include "probe" (dict "path" "/livez" "Values" .Values) | nindent 8 }}
        failureThreshold: 120  # a node waits 300 s for node 0
      livenessProbe: {{- include "probe" (dict "path" "/livez" "Values" .Values) | nindent 8 }}
        failureThreshold: 6
      readinessProbe: {{- include "probe" (dict "path" "/readyz" "Values" .Values) | nindent 8 }}
      resources: {{- toYaml (.standby | ternary .Values.standby.resources .Values.resources) | nindent 8 }}
      securityContext:
        allowPrivilegeEscalation: false
        readOnlyRootFilesystem: true
        capabilities: {drop: [ALL]}
      volumeMounts:
        - {name: data, mountPath: /var/lib/lora-server}
        - {name: tmp, mountPath: /tmp}
        {{- if .Values.model.configMap }}
        - {name: model, mountPath: /model, readOnly: true}
        {{- end }}
        {{- if and .leader .Values.adaptersClaim }}
        - {name: adapters, mountPath: /adapters, readOnly: true}
        {{- end }}
        {{- if .Values.tls.secret }}
        - {name: tls, mountPath: /tls, readOnly: true}
        {{- end }}
        {{- if .Values.joinTokenSecret }}
        - {name: join, mountPath: /join, readOnly: true}
        {{- end }}
  volumes:
    - name: data
      {{- if and .leader .Values.dataClaim (not .standby) }}
      persistentVolumeClaim: {claimName: {{ .Values.dataClaim }}}
      {{- else }}
      emptyDir: {sizeLimit: {{ .Values.dataSizeLimit }}}
      {{- end }}
    - name: tmp
      emptyDir: {}
    {{- with .Values.model.configMap }}
    - name: model
      configMap: {name: {{ . }}}
    {{- end }}
    {{- if and .leader .Values.adaptersClaim }}
    - name: adapters
      persistentVolumeClaim: {claimName: {{ .Values.adaptersClaim }}, readOnly: true}
    {{- end }}
    {{- with .Values.tls.secret }}
    - name: tls
      secret: {secretName: {{ . }}, defaultMode: 0440}
    {{- end }}
    {{- with .Values.joinTokenSecret }}
    - name: join
      secret: {secretName: {{ . }}, defaultMode: 0440}
    {{- end }}
  {{- with .Values.nodeSelector }}
  nodeSelector: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.tolerations }}
  tolerations: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.affinity }}
  affinity: {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}
