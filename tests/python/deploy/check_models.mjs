// Checks documents with the models of @kubernetes-models: `node check_models.mjs NODE_MODULES < documents.json`.
// Reads a JSON array of documents, and prints a JSON array with an error or "" for each.
import { readFileSync } from "node:fs";

const FILES = {
  ScaledObject: "keda/keda.sh/v1alpha1/ScaledObject.js",
  PodMonitor: "prometheus-operator/monitoring.coreos.com/v1/PodMonitor.js",
  PrometheusRule: "prometheus-operator/monitoring.coreos.com/v1/PrometheusRule.js",
  HTTPRoute: "gateway-api/gateway.networking.k8s.io/v1/HTTPRoute.js",
  Application: "argo-cd/argoproj.io/v1alpha1/Application.js",
  HelmRelease: "flux-cd/helm.toolkit.fluxcd.io/v2/HelmRelease.js",
  OCIRepository: "flux-cd/source.toolkit.fluxcd.io/v1/OCIRepository.js",
};

async function check(document) {
  const file = FILES[document.kind];
  if (!file) return `no model for the kind ${document.kind}`;
  const model = (await import(`${process.argv[2]}/@kubernetes-models/${file}`))[document.kind];
  const { apiVersion, kind, ...fields } = document;
  try {
    const found = new model(fields);
    if (found.apiVersion !== apiVersion) return `apiVersion is ${apiVersion}, expected ${found.apiVersion}`;
    found.validate();
    return "";
  } catch (error) {
    return error.message;
  }
}

const documents = JSON.parse(readFileSync(0, "utf8"));
console.log(JSON.stringify(await Promise.all(documents.map(check))));
