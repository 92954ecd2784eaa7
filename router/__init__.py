"""The front of a cluster: text in, text out. Imports no torch, and of ours nothing.

A request's way through the files:

    connection, app          HTTP: routes, errors; absent_routes, tokenization, openapi beside
    body, intake             bytes to a Job: openai (fields), refusals, sampling, prompts, chat_options
    chat, encoding, tools, past_calls      messages to the prompt, in the model's own language
    guided, json_schema, tool_grammar, grammar_check      what the answer must match
    exchange, choices        one request's life over HTTP, and its several answers
    dispatch, turns, attempt, shared_prefill, policy      the queue, one try at a pair, retries
    registry, workers, bring_up, control      the workers: who lives, joins, leaves; which pairs are ready
    client, inbox, protocol  what is sent to them, what comes
    pipeline, tokenizer, reasoning, tool_calls, call_arguments      tokens to the fields of an answer
    answer, logprobs         fields to bytes

    config, metrics, errors, seams         what every stage uses
    bench, load, loopback; guided_bench, guided_cases      what it costs
"""
