//! TSPA: factors are rotated and scaled before they are averaged, in ways that leave each adapter's own update as it is.
//!
//! A reconstruction. Of Li et al., *Two-Stage Parameter Alignment for Multi-LoRA Merging in LLMs* (Findings of ACL 2026), only the
//! abstract is public: rotations inside the low-rank space, kept orthogonal on the Stiefel manifold, against an average model (cost
//! linear in the number of adapters), a macro-functional and a micro-parameter objective. What is ours: which functionals these are,
//! that attention shares a rotation between `q`, `k` and between `v`, `o`, the start, the optimisers and the final scale.
//!
//! For a module, with each scale's root in both factors: `A_s = [A_1; ..; A_N]` (`S x d_in`), `B_s = [B_1 .. B_N]` (`d_out x S`), `X =
//! [X_1 .. X_N]` (`R x S`) with `X_i^T X_i = I`, `w = 1/N`. The pair `(B_i X_i^T, X_i A_i)` has the rank `R` and the product `B_i A_i`
//! whatever `X_i` is; only the average of such pairs depends on it. The merged update is `B_s C A_s` with `C = w^2 X^T X`, the target
//! `B_s M A_s` with `M = w I`, the mean of the updates. With the Gram matrices `G_A = A_s A_s^T` and `G_B = B_s^T B_s` all of it is
//! algebra of `S x S` matrices.

use nalgebra::DMatrix;

use super::decompose::svd;

/// Ranks of the sources as ranges of the stacked factors.
#[derive(Clone, Debug)]
pub(super) struct Blocks(Vec<(usize, usize)>); // first, rank

impl Blocks {
    pub(super) fn new(ranks: &[usize]) -> Self {
        let firsts = ranks.iter().scan(0, |next, r| {
            *next += r;
            Some(*next - r)
        });
        Self(firsts.zip(ranks.iter().copied()).collect())
    }

    fn total(&self) -> usize {
        self.0.iter().map(|(_, r)| r).sum()
    }

    fn n(&self) -> usize {
        self.0.len()
    }

    /// `X_i = [I; 0]`: plain zero-padding, where the search begins.
    pub(super) fn padding(&self, rank: usize) -> DMatrix<f64> {
        let mut x = DMatrix::zeros(rank, self.total());
        for (first, r) in &self.0 {
            x.view_mut((0, *first), (*r, *r)).fill_with_identity();
        }
        x
    }
}

/// Gram matrices of one module's stacked factors, `[S, S]` each.
#[derive(Clone, Debug)]
pub(super) struct Gram {
    /// `A_s A_s^T`
    pub(super) a: DMatrix<f64>,
    /// `B_s^T B_s`
    pub(super) b: DMatrix<f64>,
}

impl Gram {
    /// `tr(C G_B M G_A) / tr(C G_B C G_A)`: what brings the merged update nearest to the mean of the updates.
    pub(super) fn least_squares_scale(&self, x: &DMatrix<f64>, blocks: &Blocks) -> f64 {
        let w = 1.0 / blocks.n() as f64;
        let c = x.tr_mul(x) * (w * w);
        let middle = &self.b * &c * &self.a;
        let (along, norm) = (middle.trace() * w, middle.dot(&c));
        if norm > 0.0 { along / norm } else { 1.0 }
    }

    /// With each source's `B` times and `A` by its scale `c`.
    pub(super) fn scaled(&self, blocks: &Blocks, scales: &[f64]) -> Self {
        let (mut a, mut b) = (self.a.clone(), self.b.clone());
        for ((first_i, r_i), c_i) in blocks.0.iter().zip(scales) {
            for ((first_j, r_j), c_j) in blocks.0.iter().zip(scales) {
                let place = ((*first_i, *first_j), (*r_i, *r_j));
                b.view_mut(place.0, place.1).scale_mut(c_i * c_j);
                a.view_mut(place.0, place.1).scale_mut(1.0 / (c_i * c_j));
            }
        }
        Self { a, b }
    }
}

/// Attention alignment: one `X` for the modules of a group that brings their average nearest to their mean update, and the objective
/// after each step.
///
/// `J1 = sum_m |B_s (C - M) A_s|^2 / |B_s M A_s|^2`, by Riemannian gradient descent: the gradient projected onto the tangent space of
/// each `X_i`, QR as retraction, Armijo's rule. `J1` never rises.
pub(super) fn attention(grams: &[&Gram], blocks: &Blocks, rank: usize) -> (DMatrix<f64>, Vec<f64>) {
    const MOST_STEPS: usize = 200;
    let w = 1.0 / blocks.n() as f64;
    let norms: Vec<f64> = grams.iter().map(|g| (&g.b * &g.a).trace() * w * w).collect();
    let objective = |x: &DMatrix<f64>| {
        let mut error = x.tr_mul(x) * (w * w); // C - M
        (0..error.nrows()).for_each(|i| error[(i, i)] -= w);
        let (mut value, mut slope) = (0.0, DMatrix::zeros(error.nrows(), error.nrows()));
        for (gram, norm) in grams.iter().zip(&norms).filter(|(_, norm)| **norm > 0.0) {
            let f = &gram.b * &error * &gram.a;
            value += f.dot(&error) / norm;
            slope += (&f + f.transpose()) / *norm;
        }
        (value, slope)
    };
    let gradient = |x: &DMatrix<f64>, slope: &DMatrix<f64>| x * slope * (2.0 * w * w);
    let mut x = blocks.padding(rank);
    let (mut value, mut slope) = objective(&x);
    let (mut history, mut step) = (vec![value], 1.0);
    for _ in 0..MOST_STEPS {
        let mut direction = gradient(&x, &slope);
        for (first, r) in &blocks.0 {
            let (y, z) = (x.columns(*first, *r), direction.columns(*first, *r));
            let s = y.tr_mul(&z);
            let tangent = z - y * ((&s + s.transpose()) / 2.0);
            direction.columns_mut(*first, *r).copy_from(&tangent);
        }
        let length = direction.norm_squared();
        if length < 1e-16 * value.max(1.0) {
            break;
        }
        let next = loop {
            let next = retracted(&(&x - &direction * step), blocks);
            let (next_value, next_slope) = objective(&next);
            if next_value <= value - 1e-4 * step * length {
                break Some((next, next_value, next_slope));
            }
            step *= 0.5;
            if step <= 1e-12 {
                break None;
            }
        };
        let Some(next) = next else { break };
        let before = value;
        (x, value, slope) = next;
        history.push(value);
        step = (step * 2.0).min(1e3);
        if before - value < 1e-9 * value.max(1.0) {
            break;
        }
    }
    (x, history)
}

/// Each block's columns made orthonormal, by QR with a positive diagonal.
fn retracted(x: &DMatrix<f64>, blocks: &Blocks) -> DMatrix<f64> {
    let mut retracted = x.clone();
    for (first, r) in &blocks.0 {
        let qr = x.columns(*first, *r).into_owned().qr();
        let (mut q, upper) = (qr.q(), qr.r());
        for j in 0..*r {
            if upper[(j, j)] < 0.0 {
                q.column_mut(j).neg_mut();
            }
        }
        retracted.columns_mut(*first, *r).copy_from(&q);
    }
    retracted
}

/// What parameter alignment found.
#[derive(Clone, Debug)]
pub(super) struct Aligned {
    /// `X`, `[R, S]`
    pub(super) x: DMatrix<f64>,
    /// One positive scale a source.
    pub(super) scales: Vec<f64>,
    /// The objective after each sweep.
    pub(super) history: Vec<f64>,
}

/// LoRA parameter alignment: one rotation and one positive scale a source that bring its factors nearest to their averages,
/// `J2 = sum_i |c_i B_i X_i^T - Bbar|^2 + |X_i A_i / c_i - Abar|^2`.
///
/// One block after another, each step the exact minimiser given the others: a Procrustes problem for `X_i`, the positive root of `b c^4
/// - beta c^3 + alpha c - a` with the least objective for `c_i`. `J2` never rises.
pub(super) fn parameters(x: &DMatrix<f64>, gram: &Gram, blocks: &Blocks) -> Aligned {
    const MOST_SWEEPS: usize = 100;
    let n = blocks.n();
    let part = |g: &DMatrix<f64>, i: usize, j: usize| {
        let ((first_i, r_i), (first_j, r_j)) = (blocks.0[i], blocks.0[j]);
        g.view((first_i, first_j), (r_i, r_j)).into_owned()
    };
    let traces: Vec<(f64, f64)> = (0..n).map(|i| (part(&gram.a, i, i).trace(), part(&gram.b, i, i).trace())).collect();
    let mut x = x.clone();
    // A source whose factors are zero has no scale to find.
    let start = |&(a, b): &(f64, f64)| if a > 0.0 && b > 0.0 { (a / b).powf(0.25) } else { 1.0 };
    let mut scales: Vec<f64> = traces.iter().map(start).collect();
    let mut history = vec![micro(&x, &gram.scaled(blocks, &scales), blocks)];
    for _ in 0..MOST_SWEEPS {
        for i in 0..n {
            let (first_i, r_i) = blocks.0[i];
            let others = (0..n).filter(|j| *j != i);
            let mut target = DMatrix::zeros(x.nrows(), r_i);
            for j in others.clone() {
                let (first_j, r_j) = blocks.0[j];
                let c = scales[i] * scales[j];
                target += x.columns(first_j, r_j) * (part(&gram.b, j, i) * c + part(&gram.a, j, i) / c);
            }
            if target.norm_squared() > 0.0 {
                let polar = svd(target);
                x.columns_mut(first_i, r_i).copy_from(&(polar.u * polar.v_t));
            }
            let (mut beta, mut alpha) = (0.0, 0.0);
            for j in others {
                let (first_j, r_j) = blocks.0[j];
                let turned = x.columns(first_j, r_j).tr_mul(&x.columns(first_i, r_i)); // [r_j, r_i]
                beta += scales[j] * part(&gram.b, j, i).dot(&turned) / n as f64;
                alpha += part(&gram.a, j, i).dot(&turned) / scales[j] / n as f64;
            }
            let share = 1.0 - 1.0 / n as f64;
            scales[i] = best_scale(share * traces[i].1, beta, alpha, share * traces[i].0, scales[i]);
        }
        history.push(micro(&x, &gram.scaled(blocks, &scales), blocks));
        let [.., before, after] = history[..] else { unreachable!("two values at least") };
        if before - after < 1e-10 * history[0] {
            break;
        }
    }
    Aligned { x, scales, history }
}

/// `J2` of factors whose scales are in `gram`.
fn micro(x: &DMatrix<f64>, gram: &Gram, blocks: &Blocks) -> f64 {
    let turned = x.tr_mul(x);
    let own = gram.a.trace() + gram.b.trace();
    own - (gram.a.dot(&turned) + gram.b.dot(&turned)) / blocks.n() as f64
}

/// The `c > 0` with the least `b c^2 + a / c^2 - 2 beta c - 2 alpha / c`; `now` where none is better.
fn best_scale(b: f64, beta: f64, alpha: f64, a: f64, now: f64) -> f64 {
    let objective = |c: f64| b * c * c + a / (c * c) - 2.0 * beta * c - 2.0 * alpha / c;
    if !(a > 0.0 && b > 0.0) {
        return now;
    }
    // The roots are the eigenvalues of the companion matrix of b c^4 - beta c^3 + alpha c - a.
    let mut companion = DMatrix::zeros(4, 4);
    (0..3).for_each(|i| companion[(i + 1, i)] = 1.0);
    [beta / b, 0.0, -alpha / b, a / b].into_iter().enumerate().for_each(|(j, c)| companion[(0, j)] = c);
    let roots = companion.complex_eigenvalues();
    let real = roots.iter().filter(|z| z.im.abs() < 1e-9 * z.re.abs().max(1.0) && z.re > 0.0).map(|z| z.re);
    real.fold(now, |best, c| if objective(c) < objective(best) { c } else { best })
}

#[cfg(test)]
mod tests {
    use super::*;

    const RANKS: [usize; 3] = [2, 4, 2];
    const RANK: usize = 4;

    fn stacked() -> (DMatrix<f64>, DMatrix<f64>) {
        let fill = |n, m, k: f64| DMatrix::from_fn(n, m, |i, j| ((i * 13 + j * 5 + 1) as f64 * k).sin());
        (fill(8, 10, 0.61), fill(12, 8, 0.37)) // A_s, B_s
    }

    fn gram() -> Gram {
        let (a, b) = stacked();
        Gram { a: &a * a.transpose(), b: b.tr_mul(&b) }
    }

    fn check_blocks(x: &DMatrix<f64>, blocks: &Blocks, scales: &[f64]) {
        let (a, b) = stacked();
        for ((first, r), c) in blocks.0.iter().zip(scales) {
            let own = x.columns(*first, *r);
            assert!((own.tr_mul(&own) - DMatrix::identity(*r, *r)).amax() < 1e-10, "on the Stiefel manifold");
            let (a, b) = (a.rows(*first, *r), b.columns(*first, *r));
            let (turned_b, turned_a) = (b * own.transpose() * *c, own * a / *c);
            assert!((turned_b * turned_a - b * a).amax() < 1e-9, "the adapter's own update is unchanged");
        }
    }

    #[test]
    fn alignments_change_no_adapter_and_their_objectives_never_rise() {
        let (blocks, gram) = (Blocks::new(&RANKS), gram());
        let (x, history) = attention(&[&gram, &gram], &blocks, RANK);
        check_blocks(&x, &blocks, &[1.0; 3]);
        assert!(history.windows(2).all(|w| w[1] <= w[0] + 1e-12) && history.last() < history.first(), "{history:?}");
        let aligned = parameters(&x, &gram, &blocks);
        check_blocks(&aligned.x, &blocks, &aligned.scales);
        assert!(aligned.history.windows(2).all(|w| w[1] <= w[0] + 1e-9), "{:?}", aligned.history);
        assert!(aligned.history.last() < aligned.history.first(), "{:?}", aligned.history);
    }

    #[test]
    fn a_quartics_best_positive_root_is_found() {
        // a = b and alpha = beta: the objective is symmetric in c and 1 / c, its minimum at 1.
        assert!((best_scale(2.0, 0.5, 0.5, 2.0, 3.0) - 1.0).abs() < 1e-9);
        // Without cross terms the minimum is at (a / b)^(1/4).
        assert!((best_scale(1.0, 0.0, 0.0, 16.0, 1.0) - 2.0).abs() < 1e-9);
        assert_eq!(best_scale(0.0, 1.0, 1.0, 0.0, 1.5), 1.5);
    }
}
