"""The serving benchmark: load for any OpenAI-compatible endpoint, and what its streams say.

    lengths, prompts, workload   what is asked, drawn from a seed or read from a trace
    dialect                      what of the API the server takes: found by asking it once
    sse, client, stream          one streamed request, and the moments and tokens seen of it
    load                         closed loop (so many streams at a time) and open loop (so many requests a second)
    phases                       ramp, steady state and drain, found from the streams
    grouping                     servers that keep chunks back and send them together
    statistics, slo              percentiles, intervals by bootstrap, goodput
    step_law                     how long a decode step takes with N streams in it
    measurement                  all of that for one run, as the JSON shows it
    cost                         what the client itself takes of a core
    ladder                       run after run; then the step law over all of them
    progress, report, plot, html what a person sees
    serve, compare               the commands

Clocks are parameters (the event loop's own by default), so that the whole path runs in simulated time as well.
"""
