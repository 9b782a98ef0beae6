{{- /* The name of the objects, and of most the prefix. A Service has at most 63 characters, `-pods` included. */}}
{{- define "pharos.fullname" -}}
{{- $name := contains .Chart.Name .Release.Name | ternary .Release.Name (printf "%s-%s" .Chart.Name .Release.Name) }}
{{- .Values.fullnameOverride | default $name | trunc 57 | trimSuffix "-" }}
{{- end }}

{{- /* The labels that select the pods. The job of the metrics is the value of the first one, which alerts select: it is fixed. */}}
{{- define "pharos.selector" -}}
app.kubernetes.io/name: pharos
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "pharos.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{ include "pharos.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- define "pharos.image" -}}
{{- $image := .Values.image }}
{{- $problem := "image.repository is empty: no public registry has the image" }}
{{- $advice := "Build it with deploy/Containerfile, push it, and set the name: --set image.repository=registry.example.com/pharos" }}
{{- $repository := required (printf "%s. %s" $problem $advice) $image.repository }}
{{- if $image.digest }}
{{- printf "%s@%s" $repository $image.digest }}
{{- else }}
{{- printf "%s:%s" $repository ($image.tag | default .Chart.AppVersion) }}
{{- end }}
{{- end }}

{{- define "pharos.serviceAccount" -}}
{{- $account := .Values.serviceAccount }}
{{- $account.name | default ($account.create | ternary (include "pharos.fullname" .) "") }}
{{- end }}

{{- define "pharos.claim" -}}
{{- .Values.models.claim.existing | default (printf "%s-models" (include "pharos.fullname" .)) }}
{{- end }}

{{- /* The objects of a file below files/kubernetes, with the names, the namespace and the labels of this release, as YAML with the only
       key `objects`. Arguments: the root context, the path. */}}
{{- define "pharos.objects" -}}
{{- $root := index . 0 }}
{{- $path := printf "files/kubernetes/%s" (index . 1) }}
{{- $objects := list }}
{{- range $text := regexSplit "(?m)^---$" ($root.Files.Get $path) -1 }}
{{-   $object := fromYaml $text }}
{{-   if $object.kind }}
{{-     $metadata := $object.metadata }}
{{-     $_ := set $metadata "name" ($metadata.name | trimPrefix "pharos" | printf "%s%s" (include "pharos.fullname" $root)) }}
{{-     $_ := set $metadata "namespace" $root.Release.Namespace }}
{{-     $_ := set $metadata "labels" (include "pharos.labels" $root | fromYaml) }}
{{-     $objects = append $objects $object }}
{{-   end }}
{{- end }}
{{- if not $objects }}{{ fail (printf "the chart has no objects in %s" $path) }}{{ end }}
{{- dict "objects" $objects | toYaml }}
{{- end }}

{{- /* The only object of such a file. */}}
{{- define "pharos.object" -}}
{{- (include "pharos.objects" . | fromYaml).objects | first | toYaml }}
{{- end }}

{{- /* Merges a patch into a map in place, as Kustomize's strategic merge does for the patches of the components: maps by key; containers,
       variables, volumes and mounts by names or paths; null removes a field; other values replace. Arguments: the map, the patch. */}}
{{- define "pharos.merge" -}}
{{- $target := index . 0 }}
{{- range $key, $value := index . 1 }}
{{-   $old := get $target $key }}
{{-   if kindIs "invalid" $value }}
{{-     $_ := unset $target $key }}
{{-   else if and (kindIs "map" $value) (kindIs "map" $old) }}
{{-     include "pharos.merge" (list $old $value) }}
{{-   else if and (has $key (list "containers" "env" "volumes" "volumeMounts")) (kindIs "slice" $old) }}
{{-     $id := eq $key "volumeMounts" | ternary "mountPath" "name" }}
{{-     range $entry := $value }}
{{-       $same := dict }}
{{-       range $old }}
{{-         if eq (get . $id) (get $entry $id) }}{{ $same = . }}{{ end }}
{{-       end }}
{{-       if $same }}{{ include "pharos.merge" (list $same $entry) }}{{ else }}{{ $old = append $old $entry }}{{ end }}
{{-     end }}
{{-     $_ := set $target $key $old }}
{{-   else }}
{{-     $_ := set $target $key $value }}
{{-   end }}
{{- end }}
{{- end }}

{{- /* The arguments of the server as YAML with the only key `args`: those of the base with the flags of the values, and the other flags
       after them. Arguments: the root context, the arguments of the base. */}}
{{- define "pharos.args" -}}
{{- $values := (index . 0).Values }}
{{- $flags := dict
      "exit-delay-secs" $values.exit.delaySeconds
      "exit-timeout-secs" $values.exit.timeoutSeconds
      "strict-readiness" $values.strictReadiness }}
{{- with $values.models.objectStore.url }}
{{-   $_ := set $flags "model-repository" . }}
{{-   $_ := set $flags "repository-cache-directory" "/mnt/models" }}
{{- end }}
{{- $ports := "the ports of the probes and Services are fixed" }}
{{- $reserved := dict
      "exit-delay-secs" "set exit.delaySeconds"
      "exit-timeout-secs" "set exit.timeoutSeconds"
      "strict-readiness" "set strictReadiness"
      "model-repository" "set models"
      "repository-cache-directory" "set models.objectStore"
      "http-port" $ports
      "grpc-port" $ports
      "metrics-port" $ports }}
{{- range $name, $value := $values.flags }}
{{-   with get $reserved $name }}{{ fail (printf "flags.%s cannot be set: %s" $name .) }}{{ end }}
{{-   $_ := set $flags $name $value }}
{{- end }}
{{- $args := list }}
{{- range $arg := index . 1 }}
{{-   $name := regexFind "[^-=][^=]*" $arg }}
{{-   if hasKey $flags $name }}
{{-     $args = concat $args (include "pharos.flag" (list $name (get $flags $name)) | fromYamlArray) }}
{{-     $_ := unset $flags $name }}
{{-   else }}
{{-     $args = append $args $arg }}
{{-   end }}
{{- end }}
{{- range $name, $value := $flags }}
{{-   $args = concat $args (include "pharos.flag" (list $name $value) | fromYamlArray) }}
{{- end }}
{{- dict "args" $args | toYaml }}
{{- end }}

{{- /* The arguments for a flag as a YAML list: one for each value. JSON writes large numbers without an exponent. */}}
{{- define "pharos.flag" -}}
{{- $name := index . 0 }}
{{- $values := index . 1 }}
{{- range kindIs "slice" $values | ternary $values (list $values) }}
- {{ printf "--%s=%s" $name (kindIs "string" . | ternary . (toJson .)) | quote }}
{{- end }}
{{- end }}
