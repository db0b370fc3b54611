// Exported attention functions.

#include "attention.h"

namespace ridgeline {
namespace {

template <class T> void attention(const Call<T>& c) {
    const Schedule planned = schedule<T>(c.view, c.heads);
    const Scratch room(planned.room());
    Tickets tickets;
    Meeting meeting;
#pragma omp parallel num_threads(planned.threads)
    {
        const TileConfig configured(fits_tiles<T>(c.view));
        Work<T> work;
        const Team team = Team::here(meeting);
        attend(c, planned, static_cast<Partial*>(room.memory), tickets, work, team);
    }
}

}  // namespace

template void attend(const Call<bf16>&, const Schedule&, Partial*, Tickets&, Work<bf16>&, Team);
template void attend(const Call<float>&, const Schedule&, Partial*, Tickets&, Work<float>&, Team);

RIDGELINE_API void rl_attention_bf16(const View* view, const bf16* q, bf16* out, const bf16* cache, index heads,
                                     index q_stride, float* lse) {
    attention(Call<bf16>{*view, q, out, cache, heads, q_stride, lse});
}
RIDGELINE_API void rl_attention_f32(const View* view, const float* q, float* out, const float* cache, index heads,
                                    index q_stride, float* lse) {
    attention(Call<float>{*view, q, out, cache, heads, q_stride, lse});
}
RIDGELINE_REPLAYABLE(rl_attention_bf16)
RIDGELINE_REPLAYABLE(rl_attention_f32)

}  // namespace ridgeline
