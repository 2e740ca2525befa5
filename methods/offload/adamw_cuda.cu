// One AdamW step of a bf16 layer on a GPU in one pass: 26 bytes a parameter, by the very body of the host's.

#include "adamw_element.h"

// From one state into another, or the same. A row of blocks for each piece; its threads stride through it. `factor` is
// read where it is computed, so nothing waits for it. Numbers come in double precision, as torch passes them.
extern "C" __global__ void adamw(
    const uint16_t* grads, const uint16_t* weights, const uint16_t* rest, const float* exp_avg, const float* exp_avg_sq,
    uint16_t* to_weights, uint16_t* to_rest, float* to_exp_avg, float* to_exp_avg_sq, const Piece* pieces,
    const float* factor, int has_factor, double scale, double decay, double grad_weight, double beta2,
    double grad_sq_weight, double bias2_sqrt, double epsilon, double minus_step_size) {
    const Piece piece = pieces[blockIdx.y];
    const int64_t tail = piece.stop - (piece.stop - piece.start) % 8;
    const Factors by = {
        static_cast<float>(has_factor ? scale * *factor : scale),
        piece.is_decayed ? static_cast<float>(decay) : 1.0f,
        static_cast<float>(grad_weight),
        static_cast<float>(beta2),
        static_cast<float>(grad_sq_weight),
        static_cast<float>(bias2_sqrt),
        static_cast<float>(epsilon),
        static_cast<float>(minus_step_size),
    };
    const State<Bf16> from = {const_cast<uint16_t*>(weights), const_cast<uint16_t*>(rest), const_cast<float*>(exp_avg),
                              const_cast<float*>(exp_avg_sq)};
    const State<Bf16> to = {to_weights, to_rest, to_exp_avg, to_exp_avg_sq};
    const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
    int64_t i = piece.start + static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    for (; i < piece.stop; i += stride) {
        if (i < tail)
            update<false>(grads + i, from.at(i), to.at(i), 1, by);
        else
            update<true>(grads + i, from.at(i), to.at(i), 1, by);
    }
}
