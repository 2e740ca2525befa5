"""Talks to a Kubernetes cluster through its Python client: creates and deletes Jobs, reads pods and their logs."""

from __future__ import annotations

import json
import os
from typing import Any

from harness.base.json_object import JsonObject
from harness.core.method import Unavailable
from places.shared.pods import MAIN, PodState, state_of

ANSWER_SECONDS = 30.0  # seconds that a request may take
LOG_SECONDS = (30.0, 300.0)  # seconds to connect to a log, and to wait for the log's next bytes
JOBSET = ("jobset.x-k8s.io", "v1alpha2")
# names of a pod's labels, which hold the name of the pod's Job and the id of the call that made the pod
LABEL, CALL = "harness/job", "harness/call"
NO_CLUSTER = "no Kubernetes answers: {}; let KUBECONFIG name one, or leave --on kubernetes out"


class Cluster:
    """The cluster that the kubeconfig names or, without a kubeconfig, the cluster in which this process runs. Raises
    Unavailable if there is no such cluster."""

    def __init__(self, namespace: str | None) -> None:
        from kubernetes import client, config

        configuration = client.Configuration()
        try:
            # the client reads this variable only once, when it is imported
            file = os.environ.get("KUBECONFIG")
            config.load_kube_config(file, client_configuration=configuration)
            context = config.list_kube_config_contexts(file)[1]["context"]
            self.namespace = namespace or context.get("namespace") or "default"
        except config.ConfigException:
            try:
                config.load_incluster_config(configuration)
            except config.ConfigException as error:
                raise Unavailable(NO_CLUSTER.format("there is no kubeconfig")) from error
            self.namespace = namespace or "default"
        api = client.ApiClient(configuration)
        self.core, self.batch, self.custom = (
            client.CoreV1Api(api),
            client.BatchV1Api(api),
            client.CustomObjectsApi(api),
        )
        self.has_jobsets = self._has_jobsets()

    def ask(self, call: Any, *arguments: Any, **options: Any) -> Any:
        """Send a request and return the answer, parsed from JSON. Raises Unavailable if no answer comes, ValueError if
        Kubernetes refuses the request."""
        from kubernetes.client import ApiException
        from urllib3.exceptions import HTTPError

        try:
            return json.loads(
                call(*arguments, **options, _preload_content=False, _request_timeout=ANSWER_SECONDS).data
            )
        except HTTPError as error:
            raise Unavailable(NO_CLUSTER.format(" ".join(str(error).split()))) from error
        except ApiException as error:
            raise ValueError(f"Kubernetes refuses the request: {refusal(error)}; see --kubernetes") from error

    def _has_jobsets(self) -> bool:
        try:
            self.ask(self.custom.get_api_resources, *JOBSET)
        except ValueError as error:
            if is_missing(error):
                return False
            raise Unavailable(str(error)) from error
        return True

    def create(self, documents: list[JsonObject]) -> None:
        """Create the first document's object, a Job or JobSet, and then the other objects, which the first owns."""
        owner_document, *owned_documents = documents
        if owner_document["kind"] == "JobSet":
            create = self.custom.create_namespaced_custom_object
            created = self.ask(create, *JOBSET, self.namespace, "jobsets", owner_document)
        else:
            created = self.ask(self.batch.create_namespaced_job, self.namespace, owner_document)
        kind_fields = {name: owner_document[name] for name in ("apiVersion", "kind")}
        owner = {**kind_fields, "name": owner_document["metadata"]["name"], "uid": created["metadata"]["uid"]}
        creator_of_kind = {
            "ConfigMap": self.core.create_namespaced_config_map,
            "Service": self.core.create_namespaced_service,
        }
        for document in owned_documents:
            owned = {**document, "metadata": {**document["metadata"], "ownerReferences": [owner]}}
            self.ask(creator_of_kind[document["kind"]], self.namespace, owned)

    def delete(self, name: str) -> None:
        """Delete a Job or JobSet and all objects that it owns; its pods get SIGTERM. If the Job is already gone, do
        nothing."""
        options = {"propagation_policy": "Background"}
        try:
            if self.has_jobsets:
                delete = self.custom.delete_namespaced_custom_object
                self.ask(delete, *JOBSET, self.namespace, "jobsets", name, **options)
            else:
                self.ask(self.batch.delete_namespaced_job, name, self.namespace, **options)
        except ValueError as error:
            if not is_missing(error):
                raise

    def pods(self, call: str) -> dict[str, list[PodState]]:
        """Return the states of all pods that a call has made, by the name of the pods' Job."""
        selector = f"{CALL}={call}"
        answer = self.ask(self.core.list_namespaced_pod, self.namespace, label_selector=selector)
        states: dict[str, list[PodState]] = {}
        for pod in answer["items"]:
            job = pod["metadata"].get("labels", {}).get(LABEL, "")
            states.setdefault(job, []).append(state_of(pod))
        return states

    def log(self, pod: str) -> Any:
        """Return a response that streams a pod's log until the pod's main container has ended."""
        read = self.core.read_namespaced_pod_log
        return read(
            pod,
            self.namespace,
            container=MAIN,
            follow=True,
            _preload_content=False,
            _request_timeout=LOG_SECONDS,
        )


def is_missing(error: ValueError) -> bool:
    """True if Kubernetes refused the request because the requested object does not exist."""
    return getattr(error.__cause__, "status", None) == 404


def refusal(error: Any) -> str:
    """Return Kubernetes' own message about a refused request."""
    try:
        return " ".join(str(json.loads(error.body)["message"]).split())
    except (TypeError, ValueError, KeyError):
        return f"{error.status} {error.reason}"
