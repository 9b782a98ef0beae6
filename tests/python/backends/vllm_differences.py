"""The deliberate differences from the answers of vLLM, with their reasons (`test_vllm_answers.py`)."""

ANSWERS = {
    "system_fingerprint": (("string", "null"), "vLLM writes its version. The fingerprint is for engines that promise the same text for a seed; none here does."),
    "usage.prompt_tokens_details": (("null", "absent"), "vLLM needs --enable-prompt-tokens-details; here the tokens of the cache are always shown."),
    "usage.prompt_tokens_details.cached_tokens": (("absent", "number"), "See usage.prompt_tokens_details."),
}  # fmt: skip
"""Differences of all answers with status 200: place -> types (vLLM's, ours) and the reason."""

ERRORS = {
    "error.code": (("number", "null"), "vLLM repeats the status. OpenAI's code is a text such as model_not_found, which programs compare."),
    "error.param": (("null", "string"), "The field at fault is always named, if there is one."),
}
"""Differences of all errors."""

STATUSES = {
    "bestof": (400, "best_of", "vLLM ignores best_of since its removal. A value that has no effect is refused here."),
    "ctx3": (200, "", "vLLM refuses a max_tokens above the context, but caps it if only prompt and max_tokens exceed it. Here both are capped."),
    "guided_removed": (400, "guided_choice", "vLLM ignores the field since its removal, and the text is not constrained."),
    "priority": (400, "priority", "vLLM documents an error without priority scheduling, but answers 200."),
    "stopmany": (200, "", "vLLM allows 4 stop strings (VLLM_MAX_STOP_STRINGS), this server 16."),
    "tools_named": (200, "", "vLLM needs a parser. The schema of the function is enforced here, so that nothing has to be parsed."),
}  # fmt: skip
"""Other statuses: case -> ours, the field that our error names, and the reason."""
