// Where a model has two kinds of heads, what belongs to one (attention.cuh, attention_pipeline.cuh, attending.cuh,
// heads.cuh) is included for each. This makes `attend`, the names beside it, and the macros of heads those of the
// second kind; included once more, those of the first kind again.
#undef HEAD_DIM
#undef KV_HEADS
#undef CACHE_HEADS
#undef ROPE_PAIRS
#undef ATTENTION_LOADS
#ifndef attend
#define attend second_attend
#define attending second_attending
#define Attending SecondAttending
#define side_of second_side_of
#define keys_of second_keys_of
#define values_of second_values_of
#define stage_heads second_stage_heads
#define attend_split second_attend_split
#define GROUPS_PER_HEAD SECOND_GROUPS_PER_HEAD
#define HEAD_DIM SECOND_HEAD_DIM
#define KV_HEADS SECOND_KV_HEADS
#define CACHE_HEADS SECOND_CACHE_HEADS
#define ROPE_PAIRS SECOND_ROPE_PAIRS
#define ATTENTION_LOADS SECOND_ATTENTION_LOADS
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
