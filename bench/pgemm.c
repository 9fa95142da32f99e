/* Times ScaLAPACK's pdgemm or psgemm, C (m x n) = A (m x k) B (k x n), on block-cyclic operands: one JSON line on rank 0.
 * Called by gemm_vs_scalapack.py, which builds it with the mpicc of the MPI that Debian's ScaLAPACK belongs to.
 * Usage: pgemm d|s m n k repeat GRID:BLOCK...      such as  pgemm d 2048 2048 2048 3 2x1:64 1x2:128
 * Next: scalapack.py (build and start), gemm_vs_scalapack.py (what is compared with what). */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <math.h>
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

extern void Cblacs_get(int context, int what, int *value);
extern void Cblacs_gridinit(int *context, const char *order, int rows, int columns);
extern void Cblacs_gridinfo(int context, int *rows, int *columns, int *row, int *column);
extern void Cblacs_gridexit(int context);
extern int numroc_(const int *n, const int *block, const int *index, const int *source, const int *parts);
extern void descinit_(int *descriptor, const int *m, const int *n, const int *mb, const int *nb, const int *row_source,
                      const int *column_source, const int *context, const int *leading, int *info);
extern void pdgemm_();
extern void psgemm_();
extern void dgemm_(const char *, const char *, const int *, const int *, const int *, const double *, const double *, const int *,
                   const double *, const int *, const double *, double *, const int *);

enum { WARM_UPS = 1, PROBE = 1024, PROBE_RUNS = 3 };

typedef struct {
    int context, rows, columns, row, column, block;
} Grid;

typedef struct {
    void *data;
    int local_rows, local_columns, descriptor[9];
} Matrix;

static int rank, is_double;

static void fail(const char *what) {
    fprintf(stderr, "pgemm: %s\n", what);
    MPI_Abort(MPI_COMM_WORLD, 1);
}

static int global_index(int local, int block, int parts, int part) {
    return (local / block * parts + part) * block + local % block;
}

/* Seconds on the clock that all ranks of the node share; MPI_Wtime may begin at a moment of each rank's own. */
static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + 1e-9 * time.tv_nsec;
}

/* Factors of the operands: A = u(i) w(l), B = v(j) / w(l), so that C = k u(i) v(j) and every element can be checked. */
static double factor(int index, double step) {
    double value = index * step;
    return 0.5 + (value - floor(value));
}
static double u(int i) { return factor(i, 0.6180339887); }
static double v(int j) { return factor(j, 0.4142135623); }
static double w(int l) { return factor(l, 0.7320508075); }
static double a_element(int i, int l) { return u(i) * w(l); }
static double b_element(int l, int j) { return v(j) / w(l); }

static double get(const Matrix *x, size_t at) { return is_double ? ((double *)x->data)[at] : (double)((float *)x->data)[at]; }

static Matrix new_matrix(const Grid *grid, int m, int n, double (*element)(int, int)) {
    Matrix x;
    const int zero = 0;
    int info;
    x.local_rows = numroc_(&m, &grid->block, &grid->row, &zero, &grid->rows);
    x.local_columns = numroc_(&n, &grid->block, &grid->column, &zero, &grid->columns);
    int leading = x.local_rows > 0 ? x.local_rows : 1;
    descinit_(x.descriptor, &m, &n, &grid->block, &grid->block, &zero, &zero, &grid->context, &leading, &info);
    size_t size = (size_t)leading * (x.local_columns > 0 ? x.local_columns : 1);
    if (info != 0 || posix_memalign(&x.data, 64, size * (is_double ? 8 : 4))) fail("cannot make a block-cyclic matrix");
    for (int column = 0; column < x.local_columns; column++)
        for (int row = 0; row < x.local_rows; row++) {
            int i = global_index(row, grid->block, grid->rows, grid->row);
            int j = global_index(column, grid->block, grid->columns, grid->column);
            double value = element ? element(i, j) : 0;
            size_t at = (size_t)column * leading + row;
            if (is_double) ((double *)x.data)[at] = value;
            else ((float *)x.data)[at] = (float)value;
        }
    return x;
}

static double worst_error(const Grid *grid, const Matrix *c, int k) {
    double worst = 0;
    for (int column = 0; column < c->local_columns; column++)
        for (int row = 0; row < c->local_rows; row++) {
            int i = global_index(row, grid->block, grid->rows, grid->row);
            int j = global_index(column, grid->block, grid->columns, grid->column);
            double want = k * u(i) * v(j);
            double error = fabs(get(c, (size_t)column * c->local_rows + row) - want) / want;
            if (!(error <= worst)) worst = error;
        }
    MPI_Allreduce(MPI_IN_PLACE, &worst, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    return worst;
}

static void product(Matrix *a, Matrix *b, Matrix *c, int m, int n, int k) {
    const int one = 1;
    const double alpha = 1, beta = 0;
    const float alpha_single = 1, beta_single = 0;
    if (is_double)
        pdgemm_("N", "N", &m, &n, &k, &alpha, a->data, &one, &one, a->descriptor, b->data, &one, &one, b->descriptor, &beta, c->data,
                &one, &one, c->descriptor);
    else
        psgemm_("N", "N", &m, &n, &k, &alpha_single, a->data, &one, &one, a->descriptor, b->data, &one, &one, b->descriptor,
                &beta_single, c->data, &one, &one, c->descriptor);
}

static void measure(Grid grid, int m, int n, int k, int repeat, int first) {
    int origin;
    Cblacs_get(-1, 0, &origin);
    grid.context = origin;
    Cblacs_gridinit(&grid.context, "Row", grid.rows, grid.columns);
    Cblacs_gridinfo(grid.context, &grid.rows, &grid.columns, &grid.row, &grid.column);
    Matrix a = new_matrix(&grid, m, k, a_element), b = new_matrix(&grid, k, n, b_element), c = new_matrix(&grid, m, n, NULL);
    if (rank == 0) printf("%s{\"grid\": [%d, %d], \"block\": %d, \"seconds\": [", first ? "" : ", ", grid.rows, grid.columns, grid.block);
    for (int run = -WARM_UPS; run < repeat; run++) {
        MPI_Barrier(MPI_COMM_WORLD);
        double start = now();
        product(&a, &b, &c, m, n, k);
        double end = now(), first, last; /* from the first rank's start to the last rank's end */
        MPI_Reduce(&start, &first, 1, MPI_DOUBLE, MPI_MIN, 0, MPI_COMM_WORLD);
        MPI_Reduce(&end, &last, 1, MPI_DOUBLE, MPI_MAX, 0, MPI_COMM_WORLD);
        if (rank == 0 && run >= 0) printf("%s%.9f", run ? ", " : "", last - first);
    }
    double error = worst_error(&grid, &c, k);
    if (rank == 0) printf("], \"worst_error\": %.3e}", error);
    free(a.data);
    free(b.data);
    free(c.data);
    Cblacs_gridexit(grid.context);
    if (!(error < (is_double ? 1e-10 : 1e-2))) fail("the product is wrong");
}

/* Gflop/s of one core: the local BLAS on rank 0 alone. */
static double core_speed(void) {
    const int n = PROBE;
    const double one = 1, zero = 0;
    double *x = malloc(3 * sizeof(double) * n * n), best = 1e9;
    for (int i = 0; i < 3 * n * n; i++) x[i] = u(i);
    for (int run = 0; run < PROBE_RUNS; run++) {
        double start = now();
        dgemm_("N", "N", &n, &n, &n, &one, x, &n, x + n * n, &n, &zero, x + 2 * n * n, &n);
        best = fmin(best, now() - start);
    }
    free(x);
    return 2.0 * n * n * n / best / 1e9;
}

int main(int count, char **words) {
    MPI_Init(&count, &words);
    int ranks;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    if (count < 7) fail("usage: pgemm d|s m n k repeat GRID:BLOCK...");
    is_double = words[1][0] == 'd';
    int m = atoi(words[2]), n = atoi(words[3]), k = atoi(words[4]), repeat = atoi(words[5]);
    if (rank == 0) {
        const char *(*core_name)(void) = (const char *(*)(void))dlsym(RTLD_DEFAULT, "openblas_get_corename");
        Dl_info blas;
        dladdr(dlsym(RTLD_DEFAULT, "dgemm_"), &blas);
        int is_openblas = core_name && strstr(blas.dli_fname, "openblas");
        printf("{\"ranks\": %d, \"core_type\": \"%s\", \"blas\": \"%s\", ", ranks, is_openblas ? core_name() : "", blas.dli_fname);
        printf("\"gflops_per_core\": %.2f, \"results\": [", core_speed());
    }
    MPI_Barrier(MPI_COMM_WORLD);
    for (int word = 6; word < count; word++) {
        Grid grid;
        if (sscanf(words[word], "%dx%d:%d", &grid.rows, &grid.columns, &grid.block) != 3 || grid.rows * grid.columns != ranks)
            fail("a grid is ROWSxCOLUMNS:BLOCK, and its places are the ranks");
        measure(grid, m, n, k, repeat, word == 6);
    }
    if (rank == 0) printf("]}\n");
    MPI_Finalize();
    return 0;
}
