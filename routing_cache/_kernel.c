/* Whether every id of a block of rows is in range and every set's K ids differ.
 *
 * The one loop of the package that numpy cannot express cheaply: comparing all pairs within K ids
 * takes it seven passes over the bytes where this takes one. Optional: without a C compiler the
 * package builds and runs without it, and numpy does the same check. It only ever says "all good";
 * which rows are bad is found out by numpy, so there is one definition of a bad row.
 *
 * A vector holds several whole sets. A set is compared with itself rotated by 1 to K/2 places,
 * which meets every pair of places.
 */
#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#define VECTOR_BYTES 32
#define BLOCK 512 /* vectors between two looks at the verdict: damage ends the loop early */

#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GLIBC__) && !defined(__clang__)
#define FOR_EACH_CPU __attribute__((target_clones("avx2", "default")))
#else
#define FOR_EACH_CPU
#endif

typedef uint8_t bytes_vector __attribute__((vector_size(VECTOR_BYTES)));
typedef uint16_t words_vector __attribute__((vector_size(VECTOR_BYTES)));

/* all_good_<name>(ids, count, limit): count is a multiple of the ids in one vector. */
#define DEFINE_ALL_GOOD(name, element, vector, k)                                              \
    FOR_EACH_CPU static int all_good_##name(const char *ids, Py_ssize_t count, element top)    \
    {                                                                                          \
        enum { LANES = VECTOR_BYTES / sizeof(element) };                                       \
        vector rotate[k / 2], highest;                                                         \
        for (int lane = 0; lane < LANES; lane++) {                                             \
            highest[lane] = top;                                                               \
            for (int by = 1; by <= k / 2; by++)                                                \
                rotate[by - 1][lane] = (element)(lane / k * k + (lane + by) % k);              \
        }                                                                                      \
        for (Py_ssize_t at = 0; at < count;) {                                                 \
            Py_ssize_t stop = at + BLOCK * LANES < count ? at + BLOCK * LANES : count;         \
            vector wrong = {0};                                                                \
            for (; at < stop; at += LANES) {                                                   \
                vector set;                                                                    \
                /* Bytes, because an array from a file may lie at an odd address. */           \
                memcpy(&set, ids + at * (Py_ssize_t)sizeof(element), VECTOR_BYTES);            \
                wrong |= (vector)(set > highest);                                              \
                for (int by = 0; by < k / 2; by++)                                             \
                    wrong |= (vector)(set == SHUFFLE(set, rotate[by]));                        \
            }                                                                                  \
            for (int lane = 0; lane < LANES; lane++)                                           \
                if (wrong[lane])                                                               \
                    return 0;                                                                  \
        }                                                                                      \
        return 1;                                                                              \
    }
#define SHUFFLE(set, places) __builtin_shuffle(set, places)

DEFINE_ALL_GOOD(bytes_2, uint8_t, bytes_vector, 2)
DEFINE_ALL_GOOD(bytes_4, uint8_t, bytes_vector, 4)
DEFINE_ALL_GOOD(bytes_8, uint8_t, bytes_vector, 8)
DEFINE_ALL_GOOD(words_2, uint16_t, words_vector, 2)
DEFINE_ALL_GOOD(words_4, uint16_t, words_vector, 4)
DEFINE_ALL_GOOD(words_8, uint16_t, words_vector, 8)

static int all_good(const char *ids, Py_ssize_t count, int width, int k, int top)
{
    if (width == 1) {
        return k == 2   ? all_good_bytes_2(ids, count, (uint8_t)top)
               : k == 4 ? all_good_bytes_4(ids, count, (uint8_t)top)
                        : all_good_bytes_8(ids, count, (uint8_t)top);
    }
    return k == 2   ? all_good_words_2(ids, count, (uint16_t)top)
           : k == 4 ? all_good_words_4(ids, count, (uint16_t)top)
                    : all_good_words_8(ids, count, (uint16_t)top);
}

static PyObject *all_rows_good(PyObject *module, PyObject *args)
{
    Py_buffer rows;
    int width, k, num_experts;
    if (!PyArg_ParseTuple(args, "y*iii", &rows, &width, &k, &num_experts))
        return NULL;
    PyObject *answer = NULL;
    Py_ssize_t set_bytes = (Py_ssize_t)width * k;
    int top = num_experts - 1;
    if ((width != 1 && width != 2) || (k != 2 && k != 4 && k != 8) || rows.len % set_bytes ||
        top < 0 || top >= 1 << 8 * width) {
        PyErr_Format(PyExc_ValueError,
                     "got=%zd bytes, ids of %d bytes, K=%d, %d experts expected=whole sets of "
                     "2, 4 or 8 ids of 1 or 2 bytes, experts that fit them",
                     rows.len, width, k, num_experts);
    } else {
        /* What is left behind the last whole vector is filled up with its own first set. */
        Py_ssize_t whole = rows.len / VECTOR_BYTES * VECTOR_BYTES, rest = rows.len - whole;
        char last[VECTOR_BYTES];
        int good;
        Py_BEGIN_ALLOW_THREADS;
        const char *ids = rows.buf;
        good = all_good(ids, whole / width, width, k, top);
        if (good && rest) {
            for (Py_ssize_t at = 0; at < VECTOR_BYTES; at += set_bytes)
                memcpy(last + at, ids + whole + (at < rest ? at : 0), (size_t)set_bytes);
            good = all_good(last, VECTOR_BYTES / width, width, k, top);
        }
        Py_END_ALLOW_THREADS;
        answer = PyBool_FromLong(good);
    }
    PyBuffer_Release(&rows);
    return answer;
}

static PyMethodDef methods[] = {
    {"all_rows_good", all_rows_good, METH_VARARGS,
     "all_rows_good(rows, width, k, num_experts) -> bool"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_kernel", NULL, 0, methods,
                                        NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__kernel(void) { return PyModule_Create(&definition); }
