// What a CTA of the step in one launch (persistent.cu) has of one kind of heads in shared memory while it attends.
struct Attending {
    attend::Shared shared;
    alignas(16) float query[QUERIES], key[HEAD_DIM], value[HEAD_DIM];
};
