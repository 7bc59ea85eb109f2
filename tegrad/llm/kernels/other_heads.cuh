// Where a model has two kinds of heads, what belongs to one (attention.cuh, attention_pipeline.cuh, heads.cuh) is
// included for each. This makes `attend`, the names beside it, and the macros of heads those of the wider kind;
// included once more, those of the first kind again.
#undef HEAD_DIM
#undef KV_HEADS
#undef CACHE_HEADS
#undef ROPE_PAIRS
#undef ATTENTION_LOADS
#ifndef attend
#define attend wide_attend
#define attending wide_attending
#define Attending WideAttending
#define side_of wide_side_of
#define keys_of wide_keys_of
#define values_of wide_values_of
#define stage_heads wide_stage_heads
#define attend_split wide_attend_split
#define GROUPS_PER_HEAD WIDE_GROUPS_PER_HEAD
#define HEAD_DIM WIDE_HEAD_DIM
#define KV_HEADS WIDE_KV_HEADS
#define CACHE_HEADS WIDE_CACHE_HEADS
#define ROPE_PAIRS WIDE_ROPE_PAIRS
#define ATTENTION_LOADS WIDE_ATTENTION_LOADS
#else
#undef attend
#undef attending
#undef Attending
#undef side_of
#undef keys_of
#undef values_of
#undef stage_heads
#undef attend_split
#undef GROUPS_PER_HEAD
#define HEAD_DIM FIRST_HEAD_DIM
#define KV_HEADS FIRST_KV_HEADS
#define CACHE_HEADS FIRST_CACHE_HEADS
#define ROPE_PAIRS FIRST_ROPE_PAIRS
#define ATTENTION_LOADS FIRST_ATTENTION_LOADS
#endif
