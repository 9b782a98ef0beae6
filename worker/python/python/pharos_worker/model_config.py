"""`pb_utils.ModelConfig`: the configuration that `auto_complete_config` extends. The user's settings take precedence."""

import json


class ModelConfig:
    """A configuration to complete."""

    def __init__(self, model_config):
        self._config = json.loads(model_config) if isinstance(model_config, (str, bytes)) else model_config
        for name, empty in (("name", ""), ("max_batch_size", 0), ("input", []), ("output", [])):
            self._config.setdefault(name, empty)
        for tensor in self._config["input"] + self._config["output"]:
            tensor.setdefault("data_type", "TYPE_INVALID")
            tensor["dims"] = [int(dim) for dim in tensor.get("dims") or []]

    def as_dict(self):
        """Returns the current configuration as a dictionary with the names of the schema."""
        return self._config

    def set_max_batch_size(self, max_batch_size):
        """Sets `max_batch_size`, which must not be less than the configured value."""
        given = self._config["max_batch_size"]
        if given > max_batch_size:
            raise ValueError(
                f"configuration specified max_batch_size {given}, but in auto-complete-config function for model "
                f"'{self._config['name']}' specified max_batch_size {max_batch_size}"
            )
        self._config["max_batch_size"] = max_batch_size

    def set_dynamic_batching(self):
        """Enables the dynamic batcher, unless it is enabled."""
        for other in ("sequence_batching", "ensemble_scheduling"):
            if other in self._config:
                raise ValueError(
                    f"Configuration specified scheduling_choice as '{other}', but auto-complete-config function for model "
                    f"'{self._config['name']}' tries to set scheduling_choice as 'dynamic_batching'"
                )
        self._config.setdefault("dynamic_batching", {})

    def add_input(self, input):
        """Adds an input: a dictionary with `name`, `data_type`, `dims` and optionally `optional`."""
        self._add("input", input, ("name", "data_type", "dims", "optional"))

    def add_output(self, output):
        """Adds an output: a dictionary with `name`, `data_type`, `dims`."""
        self._add("output", output, ("name", "data_type", "dims"))

    def set_model_transaction_policy(self, transaction_policy_dict):
        """Sets the transaction policy: `{"decoupled": True}`."""
        model = self._config["name"]
        if any(name != "decoupled" for name in transaction_policy_dict):
            raise ValueError(
                f"model transaction property in auto-complete-config function for model '{model}' contains property other "
                "than 'decoupled'."
            )
        policy = self._config.setdefault("model_transaction_policy", {})
        if "decoupled" in transaction_policy_dict:
            wanted = transaction_policy_dict["decoupled"]
            if policy.get("decoupled", wanted) != wanted:
                raise ValueError(
                    f"trying to change decoupled property in auto-complete-config for model '{model}', which is already set "
                    f"to '{policy['decoupled']}'."
                )
            policy["decoupled"] = wanted

    def _add(self, side, tensor, allowed):
        model, name = self._config["name"], tensor.get("name", "")
        place = "in auto-complete-config function for model"
        if any(key not in allowed for key in tensor):
            names = ", ".join(f"'{key}'" for key in allowed[:-1]) + f" and '{allowed[-1]}'"
            raise ValueError(f"{side} '{name}' {place} '{model}' contains property other than {names}.")
        for key in ("name", "data_type", "dims"):
            if key not in tensor:
                which = f"{side} '{name}'" if name else side
                raise ValueError(f"{which} {place} '{model}' is missing '{key}' property.")
        known = next((known for known in self._config[side] if known["name"] == name), None)
        if known is None:
            self._config[side].append(dict(tensor))
        else:
            self._check(side, known, tensor)
            known.update(tensor)

    def _check(self, side, known, tensor):
        model, name = self._config["name"], known["name"]
        if known["data_type"] not in ("TYPE_INVALID", tensor["data_type"]):
            raise ValueError(
                f"unable to load model '{model}', configuration expects datatype {known['data_type']} for {side} '{name}', "
                f"model provides {tensor['data_type']}"
            )
        for key, unset in (("dims", []), ("optional", None)):
            if key in tensor and known.get(key, unset) not in (unset, tensor[key]):
                raise ValueError(
                    f"model '{model}', tensor '{name}': the model expects {key} {tensor[key]} but the model configuration "
                    f"specifies {key} {known[key]}"
                )
