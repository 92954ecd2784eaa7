"""Operations of DeepSeek-V4, one a file: a torch reference, perhaps a Triton kernel, a wrapper that checks and chooses.

    quant             blocks of e4m3 and e2m1 with power-of-two scales; Hadamard transform
    rows              formats of a cache row, and typed views of paged pools
    ragged            packed batches of any query lengths, and the index arithmetic derived from them
    norm_rope         RMS norm; rotation of a row's tail
    gemm              linear layers, block-scaled FP8 ones, grouped ones
    gemm_decode       the same with kernels, for few tokens and many; a norm in front;  gemm_cut: which tile they take
    hyper_connection  residual streams mixed by doubly stochastic matrices
    hyper_connection_decode  the same in two launches a sublayer, the norm of its input included
    compress          gated pooling of 4 or 128 tokens into one entry, with running state
    indexer           scores and top-k of compressed entries
    indexer_decode    the same for a decode step, queries made ready, in three launches, or two behind cache_write
    indexer_chunk     the same for many tokens of a sequence, which share a reading of its keys
    cache_write       scatter into window rings and blocks
    cache_write_decode  the same for a decode step, norm, rope, compression, the indexer's queries too, one launch
    sparse_attention  shared-KV attention over window and selected entries, with sink
    moe               routing and experts
    expert_weights    experts in four bits, NVFP4 or MXFP4, and the order in which kernels read them
    expert_parts      what experts give each token, added up in a launch, or by who reads it
    moe_gate          gate and routing of a decode step, in one launch
    moe_routing, moe_decode  routing by given scores: lists of rows by expert; products of packed weights over them
    moe_held          routing of a rank that holds some of the experts
    one_shot          sums over ranks through each other's memory
    sampling          penalties, truncation, noise keyed by (seed, position)
    sampling_decode   the same for a decode step, log probabilities included, in three launches
    step              what a captured decode step reads of each sequence, and how it moves on, in a launch each

    launch_order        which launches take turns on a stream, and which run beside each other
    tiles, triton_env   how kernels are cut for each architecture; where Triton runs
    check, offline      the gate: every tile compiled for its targets without a GPU
    instructions        what a step's kernels issue for each weight and key, counted by the gate's compilations
    bench, gpu_timer    times on a GPU by graph replay;  sanitize: small inputs under compute-sanitizer
    table               tables for terminals

Nothing here knows a model, a request or a weight file. Import the modules themselves: this package loads nothing.
"""
