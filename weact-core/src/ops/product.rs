//! Products of matrices: f32 sums whatever the elements' type.
//!
//! The kernel multiplies rows of the left side with packed panels of the right one. Each element of a result is one chain of fused
//! multiply-adds in the order of the inner dimension: it does not depend on the number of threads, nor on which other rows are
//! computed beside it.

use std::ops::Range;

use pulp::{Simd, WithSimd};
use rayon::prelude::*;

use super::{
    buffer::Buffer,
    matrix::{Left, MOST_ROWS, Matrix, PANEL, PanelView, Strips, Weight},
};

/// Below this many multiplications a second thread costs more than it saves.
const PARALLEL_FROM: usize = 1 << 18;

/// What a product is added to.
#[derive(Clone, Copy, Debug)]
pub(super) enum Onto<'a> {
    /// Nothing.
    Zero,
    /// What the result's place holds.
    Itself,
    /// These rows, laid out as the result.
    Rows(&'a [f32]),
}

/// One summand of a product whose right side is packed.
pub(super) type Term<'a> = (Left<'a>, PanelView<'a>);

/// One summand of a product.
pub(super) type Summand<'a> = (Matrix<'a>, Weight<'a>);

/// A row-major matrix in memory as one side of a [`product`].
#[derive(Clone, Copy, Debug)]
pub struct PlainMatrix<'a>(Matrix<'a>);

impl<'a> PlainMatrix<'a> {
    /// Over `n_rows` rows of `n_cols` numbers that follow each other.
    ///
    /// # Panics
    /// If `data` has another length.
    pub fn new(data: &'a [f32], n_rows: usize, n_cols: usize) -> Self {
        assert_eq!(data.len(), n_rows * n_cols, "a matrix has as many numbers as its shape says");
        Self(Matrix::new(data, n_rows, n_cols, n_cols))
    }

    /// Rows and columns exchanged; nothing is moved.
    #[must_use]
    pub fn transposed(self) -> Self {
        Self(self.0.transposed())
    }
}

/// `left right`, row-major, for work on plain numbers outside a model. The result is the same to the bit on any number of threads.
///
/// # Panics
/// If the inner dimensions differ.
pub fn product(left: PlainMatrix<'_>, right: PlainMatrix<'_>) -> Vec<f32> {
    let mut out = vec![0.0; left.0.n_rows * right.0.n_cols];
    if !out.is_empty() {
        multiply(&[(left.0, Weight::F32(right.0))], Onto::Zero, &mut out);
    }
    out
}

/// `matrix^T matrix`, row-major: as [`product`], with no block computed twice.
pub fn gram(matrix: PlainMatrix<'_>) -> Vec<f32> {
    /// Columns computed at a time.
    const BLOCK: usize = 256;
    let turned = matrix.0.transposed();
    let n = turned.n_rows;
    let mut out = vec![0.0; n * n];
    for start in (0..n).step_by(BLOCK) {
        let width = BLOCK.min(n - start);
        let mut upper = vec![0.0; (start + width) * width];
        let columns = turned.rows(start, width).transposed();
        multiply(&[(turned.rows(0, start + width), Weight::F32(columns))], Onto::Zero, &mut upper);
        for (i, row) in upper.chunks_exact(width).enumerate() {
            out[i * n + start..][..width].copy_from_slice(row);
            row.iter().enumerate().for_each(|(j, x)| out[(start + j) * n + i] = *x);
        }
    }
    out
}

/// Numbers of the right side that are packed at a time: they stay in the cache while all rows pass by.
const PACKED: usize = 1 << 18;

/// `out = onto + sum of left * right over the summands`; `out` is contiguous, `[rows, cols]`. The sum is taken first and then
/// added. Threads share the columns, so that each packs what it reads; where there are more threads than panels, the rows too.
pub(super) fn multiply(summands: &[Summand<'_>], onto: Onto<'_>, out: &mut [f32]) {
    let (n_rows, n_cols) = (summands[0].0.n_rows, summands[0].1.dims().1);
    for (left, right) in summands {
        assert_eq!((left.n_rows, (left.n_cols, n_cols)), (n_rows, right.dims()), "shapes of a product");
    }
    assert_eq!(out.len(), n_rows * n_cols, "a result's length");
    let inner: usize = summands.iter().map(|(left, _)| left.n_cols).sum();
    let n_panels = n_cols.div_ceil(PANEL);
    let threads = if n_rows * n_cols * inner < PARALLEL_FROM { 1 } else { rayon::current_num_threads() };
    let groups = threads.min(n_panels);
    let (panels, groups) = shares(n_panels, groups);
    let (rows, _) = shares(n_rows.div_ceil(MOST_ROWS), threads.div_ceil(groups));
    let rows = rows * MOST_ROWS;
    let mut tasks: Vec<Task<'_>> = Vec::new();
    for (i, out) in out.chunks_mut(rows * n_cols).enumerate() {
        let of_block = tasks.len();
        tasks.extend((0..groups).map(|g| Task { first_row: i * rows, first_panel: g * panels, out: Vec::new() }));
        for row in out.chunks_exact_mut(n_cols) {
            let parts = row.chunks_mut(panels * PANEL);
            tasks[of_block..].iter_mut().zip(parts).for_each(|(task, part)| task.out.push(part));
        }
    }
    // Columns of a left side that is turned lie far apart: copied once, rows of a tile lie together.
    let strips: Vec<Option<Strips>> =
        summands.iter().map(|(left, _)| (left.is_turned() && n_panels > 1).then(|| left.strips(threads > 1))).collect();
    let lefts: Vec<Left<'_>> =
        summands.iter().zip(&strips).map(|((m, _), s)| s.as_ref().map_or(Left::Lies(*m), Strips::view)).collect();
    let compute = |task: Task<'_>| task.compute(&lefts, summands, onto, n_cols);
    match threads {
        1 => tasks.into_iter().for_each(compute),
        _ => tasks.into_par_iter().for_each(compute),
    }
}

/// Cuts `n` into at most `parts` equal shares: the size of a share, and how many there are.
fn shares(n: usize, parts: usize) -> (usize, usize) {
    let size = n.div_ceil(parts);
    (size, n.div_ceil(size))
}

/// A block of a product's result.
struct Task<'a> {
    first_row: usize,
    first_panel: usize,
    out: Vec<&'a mut [f32]>, // the part of each row
}

impl Task<'_> {
    fn compute(mut self, lefts: &[Left<'_>], summands: &[Summand<'_>], onto: Onto<'_>, n_cols: usize) {
        let (n_rows, width) = (self.out.len(), self.out[0].len());
        let sizes: Vec<usize> = summands.iter().map(|(left, _)| left.n_cols * PANEL).collect();
        let panels = (PACKED / sizes[0].max(1)).clamp(1, width.div_ceil(PANEL));
        let mut packed: Vec<Buffer> = sizes.iter().map(|size| Buffer::take(size * panels)).collect();
        for start in (0..width).step_by(panels * PANEL) {
            let n = (panels * PANEL).min(width - start);
            let first_col = self.first_panel * PANEL + start;
            for (packed, (_, right)) in packed.iter_mut().zip(summands) {
                right.pack(first_col, n, packed);
            }
            let mut terms: Vec<Term<'_>> = Vec::with_capacity(lefts.len());
            for (left, packed) in lefts.iter().zip(&packed) {
                let values = &packed[..n.div_ceil(PANEL) * PANEL * left.n_cols()];
                terms.push((*left, PanelView::new(values, left.n_cols(), n)));
            }
            let place = Place { first_row: self.first_row, n_rows, first_col: start };
            let onto = match onto {
                Onto::Rows(rows) => Onto::Rows(&rows[self.first_row * n_cols + first_col - start..]),
                other => other,
            };
            block(&terms, (onto, n_cols), place, &mut Parts(&mut self.out));
        }
    }
}

/// `out = onto + left right` on one thread, with a result whose rows are `stride` apart.
pub(super) fn multiply_here(terms: &[Term<'_>], onto: Onto<'_>, out: &mut [f32], stride: usize) {
    let place = Place { first_row: 0, n_rows: terms[0].0.n_rows(), first_col: 0 };
    block(terms, (onto, stride), place, &mut Strided(out, stride));
}

/// Where a result's rows are.
trait Output {
    fn row(&mut self, i: usize, columns: Range<usize>) -> &mut [f32];
}

/// Rows that are a number apart.
struct Strided<'a>(&'a mut [f32], usize);

impl Output for Strided<'_> {
    #[inline(always)]
    fn row(&mut self, i: usize, columns: Range<usize>) -> &mut [f32] {
        &mut self.0[i * self.1 + columns.start..i * self.1 + columns.end]
    }
}

/// Parts of rows.
struct Parts<'a, 'b>(&'a mut [&'b mut [f32]]);

impl Output for Parts<'_, '_> {
    #[inline(always)]
    fn row(&mut self, i: usize, columns: Range<usize>) -> &mut [f32] {
        &mut self.0[i][columns]
    }
}

/// Rows of the left sides, and where in the output their products go.
#[derive(Clone, Copy)]
struct Place {
    first_row: usize,
    n_rows: usize,
    first_col: usize,
}

/// Some rows times packed panels, on this thread. Rows to add begin where the output does, a stride apart.
fn block(terms: &[Term<'_>], onto: (Onto<'_>, usize), place: Place, out: &mut impl Output) {
    pulp::Arch::new().dispatch(Block { terms, onto, place, out });
}

struct Block<'a, O> {
    terms: &'a [Term<'a>],
    onto: (Onto<'a>, usize),
    place: Place,
    out: &'a mut O,
}

impl<O: Output> WithSimd for Block<'_, O> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Block { terms, onto, place, out } = self;
        let n_cols = terms[0].1.n_cols;
        let mut done = 0;
        // Tiles of as many rows as the registers hold, then of fewer; the rows of a tile meet all panels before the next.
        macro_rules! tiles {
            ($rows:literal, $vectors:literal) => {
                while place.n_rows - done >= $rows {
                    for p in 0..terms[0].1.n_panels() {
                        let width = PANEL.min(n_cols - p * PANEL);
                        tile::<S, O, $rows, $vectors>(simd, terms, (place, done), (p, width), onto, out);
                    }
                    done += $rows;
                }
            };
        }
        match (S::F32_LANES, n_cols <= S::F32_LANES) {
            (16, false) => {
                tiles!(12, 2);
                tiles!(8, 2);
                tiles!(4, 2);
                tiles!(1, 2);
            }
            (16, true) => {
                tiles!(12, 1);
                tiles!(4, 1);
                tiles!(1, 1);
            }
            (8, _) => {
                tiles!(6, 2);
                tiles!(2, 2);
                tiles!(1, 2);
            }
            _ => {
                tiles!(4, 1);
                tiles!(1, 1);
            }
        }
    }
}

/// A tile of `ROWS` rows and one panel, `VECTORS` vectors of columns at a time.
#[inline(always)]
fn tile<S: Simd, O: Output, const ROWS: usize, const VECTORS: usize>(
    simd: S,
    terms: &[Term<'_>],
    (place, at): (Place, usize),
    (p, width): (usize, usize),
    (onto, stride): (Onto<'_>, usize),
    out: &mut O,
) {
    let lanes = VECTORS * S::F32_LANES;
    for start in (0..width).step_by(lanes) {
        let sums = sums::<S, ROWS, VECTORS>(simd, terms, place.first_row + at, p, start / S::F32_LANES);
        // Through memory: sums that a later loop may index would live there during the products too.
        let mut tile = [[0.0_f32; PANEL]; ROWS];
        for i in 0..ROWS {
            let (row, _) = S::as_mut_simd_f32s(&mut tile[i]);
            row[..VECTORS].copy_from_slice(&sums[i]);
        }
        let n = lanes.min(width - start);
        let first = place.first_col + p * PANEL + start;
        for (i, sums) in tile.iter().enumerate() {
            let out = out.row(at + i, first..first + n);
            match onto {
                Onto::Zero => out.copy_from_slice(&sums[..n]),
                Onto::Itself => out.iter_mut().zip(sums).for_each(|(o, s)| *o += s),
                Onto::Rows(rows) => {
                    let rows = &rows[(at + i) * stride + first..][..n];
                    out.iter_mut().zip(sums).zip(rows).for_each(|((o, s), r)| *o = r + s);
                }
            }
        }
    }
}

/// The sums of a tile whose columns begin at a panel's vector `vector`.
#[inline(always)]
fn sums<S: Simd, const ROWS: usize, const VECTORS: usize>(
    simd: S,
    terms: &[Term<'_>],
    first: usize,
    p: usize,
    vector: usize,
) -> [[S::f32s; VECTORS]; ROWS] {
    let mut sums = [[simd.splat_f32s(0.0); VECTORS]; ROWS];
    for &(a, b) in terms {
        let (panel, _) = S::as_simd_f32s(b.panel(p));
        let panel = panel.chunks_exact(PANEL / S::F32_LANES);
        // Where columns lie in one piece: from the first row of the tile on, and how far apart.
        let (columns, stride) = match a {
            Left::Lies(a) if a.col_stride == 1 => {
                let n = a.n_cols;
                // Not `array::from_fn`, which may stay a call and then hides that all rows are `n` long.
                let mut rows: [&[f32]; ROWS] = [&[]; ROWS];
                for (i, row) in rows.iter_mut().enumerate() {
                    *row = &a.data[(first + i) * a.row_stride..][..n];
                }
                for (k, b) in (0..n).zip(panel) {
                    let b = &b[vector..vector + VECTORS];
                    for i in 0..ROWS {
                        let x = simd.splat_f32s(rows[i][k]);
                        for j in 0..VECTORS {
                            sums[i][j] = simd.mul_add_f32s(x, b[j], sums[i][j]);
                        }
                    }
                }
                continue;
            }
            Left::Lies(a) => (&a.data[first..], a.col_stride),
            Left::Strips { values, n_cols, .. } => {
                (&values[first / MOST_ROWS * n_cols * MOST_ROWS + first % MOST_ROWS..], MOST_ROWS)
            }
        };
        for (a, b) in columns.chunks(stride).zip(panel) {
            let (a, b) = (&a[..ROWS], &b[vector..vector + VECTORS]);
            for i in 0..ROWS {
                let x = simd.splat_f32s(a[i]);
                for j in 0..VECTORS {
                    sums[i][j] = simd.mul_add_f32s(x, b[j], sums[i][j]);
                }
            }
        }
    }
    sums
}
