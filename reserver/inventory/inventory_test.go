package inventory_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"
	"github.com/google/uuid"

	"flashsale.dev/operator/reserver/inventory"
	"flashsale.dev/operator/test/testmysql"
)

var ctx = context.Background()

// claimOne claims on a line of its own.
func claimOne(t testing.TB, store *inventory.Store, sale inventory.Sale, buyer string, quantity int) inventory.Result {
	t.Helper()
	results, err := store.Claim(ctx, sale.ID, inventory.NewLine("line-"+uuid.NewString()), []inventory.Request{{Buyer: buyer, Quantity: quantity}})
	if err != nil {
		t.Fatalf("claiming for %s: %v", buyer, err)
	}
	return results[0]
}

func wantOutcome(t testing.TB, got inventory.Result, want inventory.Outcome) {
	t.Helper()
	if got.Outcome != want {
		t.Fatalf("outcome = %v, want %v (%+v)", got.Outcome, want, got)
	}
}

// stampede lets buyers claim at once over several lines, each line in batches, and gives the results by buyer.
func stampede(t testing.TB, store *inventory.Store, sale inventory.Sale, lines int, requests []inventory.Request) []inventory.Result {
	t.Helper()
	results := make([]inventory.Result, len(requests))
	queue := make(chan int, len(requests))
	for i := range requests {
		queue <- i
	}
	close(queue)
	var wg sync.WaitGroup
	for l := range lines {
		wg.Go(func() {
			line := inventory.NewLine(fmt.Sprintf("line-%d", l))
			for first := range queue {
				batch := []int{first}
				for len(batch) < 64 {
					next, more := <-queue
					if !more {
						break
					}
					batch = append(batch, next)
				}
				asked := make([]inventory.Request, len(batch))
				for i, b := range batch {
					asked[i] = requests[b]
				}
				got, err := store.Claim(ctx, sale.ID, line, asked)
				if err != nil {
					t.Errorf("claiming: %v", err)
					return
				}
				for i, b := range batch {
					results[b] = got[i]
				}
			}
		})
	}
	wg.Wait()
	return results
}

func buyers(n, quantity int) []inventory.Request {
	requests := make([]inventory.Request, n)
	for i := range requests {
		requests[i] = inventory.Request{Buyer: fmt.Sprintf("buyer-%d", i), Quantity: quantity}
	}
	return requests
}

func count(results []inventory.Result) map[inventory.Outcome]int {
	n := map[inventory.Outcome]int{}
	for _, r := range results {
		n[r.Outcome]++
	}
	return n
}

func TestManyClaimersGetDistinctUnits(t *testing.T) {
	for _, tt := range []struct{ units, claimers, lines int }{{1, 50, 4}, {5, 1000, 4}, {300, 1000, 8}, {1000, 500, 8}} {
		t.Run(fmt.Sprintf("%d units, %d claimers, %d lines", tt.units, tt.claimers, tt.lines), func(t *testing.T) {
			t.Parallel()
			store := testmysql.Store(t)
			sale := testmysql.Sale(int64(tt.units)).In(t, store)
			results := stampede(t, store, sale, tt.lines, buyers(tt.claimers, 1))
			owner := map[int64]string{}
			for i, r := range results {
				switch r.Outcome {
				case inventory.OutcomeHeld:
					if other, taken := owner[r.Reservation.Units[0]]; taken {
						t.Errorf("unit %d went to buyer %d and to %s", r.Reservation.Units[0], i, other)
					}
					owner[r.Reservation.Units[0]] = r.Reservation.Buyer
				case inventory.OutcomeAllHeld:
				default:
					t.Errorf("buyer %d got %v", i, r.Outcome)
				}
			}
			if want := min(tt.units, tt.claimers); len(owner) != want {
				t.Errorf("%d units were granted, want %d", len(owner), want)
			}
		})
	}
}

func TestClaimScansAreServedByTheirIndex(t *testing.T) {
	store := testmysql.Store(t)
	sale := testmysql.Sale(5000).In(t, store)
	testmysql.Sale(5000).In(t, store) // another sale beside it
	// Units in every state, and statistics that know them.
	claimed := stampede(t, store, sale, 4, buyers(1000, 1))
	for _, r := range claimed[:200] {
		if _, err := testmysql.Release(store, sale.ID, r.Reservation.ID); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := store.DB().ExecContext(ctx, "ANALYZE TABLE flashsale_unit, flashsale_returned, flashsale_reservation"); err != nil {
		t.Fatal(err)
	}
	key := sale.ID[:]
	for _, tt := range []struct {
		name, query, index string
		args               []any
	}{
		{"fresh units", inventory.FreshUnitsSQL, "PRIMARY", []any{key, 1, 5001, 64}},
		{"returned units", inventory.ReturnedUnitsSQL, "PRIMARY", []any{key, 64}},
		{"sweep", inventory.WavesSQL, "PRIMARY", []any{key}},
		{"waves of live holds", inventory.LiveWavesSQL, "PRIMARY", []any{key, time.Now()}},
		{"the highest fresh unit", inventory.HighestFreshSQL, "PRIMARY", []any{key, 1 << 31}},
		{"the last fresh units", inventory.LastFreshSQL, "PRIMARY", []any{key, 4000, 4500}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			key, extra := explain(t, store, tt.query, tt.args...)
			if key != tt.index {
				t.Errorf("the scan uses index %q, want %q", key, tt.index)
			}
			if strings.Contains(extra, "filesort") || strings.Contains(extra, "temporary") {
				t.Errorf("the scan sorts: %s", extra)
			}
		})
	}
}

// explain gives the index that the server chose, and what else it says of the plan.
func explain(t *testing.T, store *inventory.Store, query string, args ...any) (key, extra string) {
	t.Helper()
	format := "FORMAT=TRADITIONAL " // MariaDB knows no other
	if testmysql.MariaDB(t) {
		format = ""
	}
	rows, err := store.DB().QueryContext(ctx, "EXPLAIN "+format+query, args...)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = rows.Close() }()
	columns, err := rows.Columns()
	if err != nil {
		t.Fatal(err)
	}
	for rows.Next() {
		values := make([]sql.NullString, len(columns))
		into := make([]any, len(columns))
		for i := range values {
			into[i] = &values[i]
		}
		if err := rows.Scan(into...); err != nil {
			t.Fatal(err)
		}
		for i, c := range columns {
			switch c {
			case "key":
				key += values[i].String
			case "Extra":
				extra += values[i].String
			}
		}
	}
	if err := rows.Err(); err != nil {
		t.Fatal(err)
	}
	return key, extra
}

// scan runs a query in a transaction, which keeps the locks, and counts its rows.
func scan(t *testing.T, tx *sql.Tx, query string, args ...any) (n int) {
	t.Helper()
	rows, err := tx.QueryContext(ctx, query, args...)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = rows.Close() }()
	for rows.Next() {
		n++
	}
	if err := rows.Err(); err != nil {
		t.Fatal(err)
	}
	return n
}

// lockedRecords counts the record locks of the transaction on a table.
func lockedRecords(t *testing.T, store *inventory.Store, connection int64, table string) int {
	t.Helper()
	var n int
	err := testmysql.Admin(t).QueryRowContext(ctx, `SELECT COUNT(*) FROM performance_schema.data_locks l
		JOIN performance_schema.threads th ON th.THREAD_ID = l.THREAD_ID
		WHERE th.PROCESSLIST_ID = ? AND l.OBJECT_NAME = ? AND l.LOCK_TYPE = 'RECORD'`, connection, table).Scan(&n)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

func TestClaimLocksOneRecordPerUnit(t *testing.T) {
	if testmysql.MariaDB(t) {
		t.Skip("MariaDB does not list the records a transaction has locked")
	}
	store := testmysql.Store(t)
	sale := testmysql.Sale(1000).In(t, store)
	held := stampede(t, store, sale, 2, buyers(100, 1)) // so that the scan passes units that are not fresh
	for _, r := range held[:40] {
		if _, err := testmysql.Release(store, sale.ID, r.Reservation.ID); err != nil {
			t.Fatal(err)
		}
	}
	for _, tt := range []struct {
		name, query, table string
		args               []any
	}{
		{"fresh", inventory.FreshUnitsSQL, "flashsale_unit", []any{sale.ID[:], 1, 1001, 64}},
		{"returned", inventory.ReturnedUnitsSQL, "flashsale_returned", []any{sale.ID[:], 30}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			tx, err := store.DB().BeginTx(ctx, nil)
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = tx.Rollback() }()
			var connection int64
			if err := tx.QueryRowContext(ctx, "SELECT CONNECTION_ID()").Scan(&connection); err != nil {
				t.Fatal(err)
			}
			units := scan(t, tx, tt.query, tt.args...)
			if want := tt.args[len(tt.args)-1].(int); units != want {
				t.Fatalf("the scan found %d units, want %d", units, want)
			}
			if locks := lockedRecords(t, store, connection, tt.table); locks != units {
				t.Errorf("%d record locks for %d units", locks, units)
			}
		})
	}
}

// Whatever an operation reads and locks, it finds by a key: in a small sale a server may prefer to walk all of it, and would
// lock it. The rows that the statements really run walked over are counted by the server, on the one connection there is.
func TestNoOperationWalksTheSale(t *testing.T) {
	dsn := testmysql.DSN(t)
	other := testmysql.Open(t, dsn)
	if _, err := other.Setup(ctx); err != nil {
		t.Fatal(err)
	}
	for _, table := range []string{"reservation", "ledger", "wave", "returned", "unit", "key"} { // which look empty to the optimizer, as at the start
		if _, err := other.DB().ExecContext(ctx, "ALTER TABLE flashsale_"+table+" STATS_PERSISTENT=1, STATS_AUTO_RECALC=0"); err != nil {
			t.Fatal(err)
		}
	}
	sale := testmysql.Sale(400).In(t, other)
	held := stampede(t, other, sale, 2, buyers(300, 1))
	for i, r := range held[100:] { // every state, and refunds due
		confirmAs(t, other, sale, r.Reservation, fmt.Sprint("pay-", i), inventory.Confirmed)
		if i%4 == 0 {
			if _, err := other.Refund(ctx, sale.ID, r.Reservation.ID, "test", true); err != nil {
				t.Fatal(err)
			}
		}
		confirmAs(t, other, sale, &inventory.Reservation{ID: uuid.New()}, fmt.Sprint("due-", i), inventory.RefundDue)
	}
	unknown := &inventory.Reservation{ID: uuid.New()}
	confirmAs(t, other, sale, unknown, "due", inventory.RefundDue)

	store, err := inventory.Open(inventory.Options{DSN: dsn, MaxConns: 1})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = store.Close() })
	walked := func() (rows int64) {
		t.Helper()
		for _, counter := range []string{"Handler_read_next", "Handler_read_prev", "Handler_read_rnd_next"} {
			var name string
			var n int64
			if err := store.DB().QueryRowContext(ctx, "SHOW SESSION STATUS LIKE '"+counter+"'").Scan(&name, &n); err != nil {
				t.Fatal(err)
			}
			rows += n
		}
		return rows
	}
	idle := walked()
	idle = walked() - idle // what asking costs
	line := inventory.NewLine("line")
	claim := func(r inventory.Request) func() error {
		return func() error {
			_, err := store.Claim(ctx, sale.ID, line, []inventory.Request{r})
			return err
		}
	}
	pay := func(r *inventory.Reservation, payment string, want inventory.State) func() error {
		return func() error { confirmAs(t, store, sale, r, payment, want); return nil }
	}
	release := func() error {
		_, err := testmysql.Release(store, sale.ID, held[2].Reservation.ID)
		return err
	}
	refund := func(r *inventory.Reservation) func() error {
		return func() error { _, err := store.Refund(ctx, sale.ID, r.ID, "test", true); return err }
	}
	for _, tt := range []struct {
		name string
		do   func() error
	}{
		{"a claim of a new buyer", claim(inventory.Request{Buyer: "new", Quantity: 1})},
		{"a claim again, with a key", claim(inventory.Request{Buyer: "new", Quantity: 1, Key: "key"})},
		{"a confirmation", pay(held[1].Reservation, "pay", inventory.Confirmed)},
		{"a confirmation again", pay(held[1].Reservation, "pay", inventory.Confirmed)},
		{"a release", release},
		{"a late payment", pay(held[2].Reservation, "late", inventory.Confirmed)},
		{"a refund", refund(held[1].Reservation)},
		{"a refund that was due", refund(unknown)},
		{"a sweep", func() error { _, err := store.Sweep(ctx, sale.ID, "sweeper", 500); return err }},
		{"a look", func() error { _, err := store.Reservation(ctx, sale.ID, held[1].Reservation.ID); return err }},
	} {
		before := walked()
		if err := tt.do(); err != nil {
			t.Fatalf("%s: %v", tt.name, err)
		}
		if rows := walked() - before - idle; rows > 20 { // the tally's few rows are walked
			t.Errorf("%s walked over %d rows", tt.name, rows)
		}
	}
}

func TestUnitsLockedByOthersAreNotSoldOut(t *testing.T) {
	store := testmysql.Store(t)
	sale := testmysql.Sale(3).In(t, store)
	tx, err := store.DB().BeginTx(ctx, nil)
	if err != nil {
		t.Fatal(err)
	}
	scan(t, tx, inventory.FreshUnitsSQL, sale.ID[:], 1, 4, 3)
	wantOutcome(t, claimOne(t, store, sale, "a", 1), inventory.OutcomeBusy)
	if err := tx.Rollback(); err != nil {
		t.Fatal(err)
	}
	wantOutcome(t, claimOne(t, store, sale, "a", 1), inventory.OutcomeHeld)
}

func TestUnitsBehindTheStartAreFound(t *testing.T) {
	store := testmysql.Store(t)
	sale := testmysql.Sale(10).In(t, store)
	tx, err := store.DB().BeginTx(ctx, nil)
	if err != nil {
		t.Fatal(err)
	}
	scan(t, tx, inventory.FreshUnitsSQL, sale.ID[:], 1, 11, 4)
	line := inventory.NewLine("line")
	results, err := store.Claim(ctx, sale.ID, line, buyers(6, 1))
	if err != nil {
		t.Fatal(err)
	}
	if n := count(results)[inventory.OutcomeHeld]; n != 6 {
		t.Fatalf("%d of the 6 unlocked units were granted", n)
	}
	if err := tx.Rollback(); err != nil { // the process that held 1..4 died
		t.Fatal(err)
	}
	results, err = store.Claim(ctx, sale.ID, line, []inventory.Request{{Buyer: "w", Quantity: 1}, {Buyer: "x", Quantity: 1}, {Buyer: "y", Quantity: 1}, {Buyer: "z", Quantity: 1}})
	if err != nil {
		t.Fatal(err)
	}
	if n := count(results)[inventory.OutcomeHeld]; n != 4 {
		t.Errorf("%d of the 4 units left behind were granted", n)
	}
}

func TestQuantityIsAllOrNothing(t *testing.T) {
	store := testmysql.Store(t)
	sale := testmysql.Sale(5).MaxPerBuyer(10).In(t, store)
	wantOutcome(t, claimOne(t, store, sale, "a", 3), inventory.OutcomeHeld)
	wantOutcome(t, claimOne(t, store, sale, "b", 3), inventory.OutcomeAllHeld) // 2 left, 3 may come back
	wantOutcome(t, claimOne(t, store, sale, "c", 6), inventory.OutcomeSoldOut) // more than there is
	got := claimOne(t, store, sale, "d", 2)
	wantOutcome(t, got, inventory.OutcomeHeld)
	if len(got.Reservation.Units) != 2 {
		t.Errorf("2 units asked for, got %v", got.Reservation.Units)
	}
}

func TestOneBatchServesABuyerOnce(t *testing.T) {
	store := testmysql.Store(t)
	sale := testmysql.Sale(5).MaxPerBuyer(2).In(t, store)
	results, err := store.Claim(ctx, sale.ID, inventory.NewLine("line"), []inventory.Request{{Buyer: "a", Quantity: 1}, {Buyer: "b", Quantity: 1}, {Buyer: "a", Quantity: 1}})
	if err != nil {
		t.Fatal(err)
	}
	wantOutcome(t, results[0], inventory.OutcomeHeld)
	wantOutcome(t, results[1], inventory.OutcomeHeld)
	wantOutcome(t, results[2], inventory.OutcomeReplay)
	if results[0].Reservation.ID != results[2].Reservation.ID {
		t.Error("two reservations for one buyer")
	}
}

// A line that has met new buyers only takes the next for strangers; those who are not are answered as if it had not.
func TestStrangersWhoAreNone(t *testing.T) {
	store := testmysql.Store(t)
	sale := testmysql.Sale(4).MaxPerBuyer(2).In(t, store)
	ask := func(requests ...inventory.Request) []inventory.Result {
		t.Helper()
		results, err := store.Claim(ctx, sale.ID, inventory.NewLine("line-"+uuid.NewString()), requests) // it has met nobody
		if err != nil {
			t.Fatal(err)
		}
		return results
	}
	held := ask(inventory.Request{Buyer: "a", Quantity: 1})[0]
	wantOutcome(t, held, inventory.OutcomeHeld)
	for _, tt := range []struct {
		name     string
		requests []inventory.Request
		want     []inventory.Outcome
	}{
		{"again", []inventory.Request{{Buyer: "a", Quantity: 1}}, []inventory.Outcome{inventory.OutcomeReplay}},
		{"again, for more than the limit", []inventory.Request{{Buyer: "a", Quantity: 3}}, []inventory.Outcome{inventory.OutcomeReplay}},
		{"beside a new buyer", []inventory.Request{{Buyer: "b", Quantity: 2}, {Buyer: "a", Quantity: 1}}, []inventory.Outcome{inventory.OutcomeHeld, inventory.OutcomeReplay}},
		{"when too few are left", []inventory.Request{{Buyer: "a", Quantity: 1}, {Buyer: "c", Quantity: 2}}, []inventory.Outcome{inventory.OutcomeReplay, inventory.OutcomeAllHeld}},
	} {
		for i, got := range ask(tt.requests...) {
			if got.Outcome != tt.want[i] || tt.requests[i].Buyer == "a" && got.Reservation.ID != held.Reservation.ID {
				t.Errorf("%s: request %d got %+v, want %v", tt.name, i, got, tt.want[i])
			}
		}
	}
	sale.Suspended, sale.Generation = true, 2
	if err := store.Register(ctx, sale); err != nil {
		t.Fatal(err)
	}
	wantOutcome(t, ask(inventory.Request{Buyer: "a", Quantity: 1})[0], inventory.OutcomeReplay)
	wantOutcome(t, ask(inventory.Request{Buyer: "d", Quantity: 1})[0], inventory.OutcomeSuspended)
}

func TestLimitCountsSoldUnits(t *testing.T) {
	store := testmysql.Store(t)
	sale := testmysql.Sale(10).MaxPerBuyer(3).In(t, store)
	first := claimOne(t, store, sale, "a", 2)
	if _, err := testmysql.Confirm(store, sale.ID, first.Reservation.ID, "pay-1"); err != nil {
		t.Fatal(err)
	}
	wantOutcome(t, claimOne(t, store, sale, "a", 2), inventory.OutcomeLimit)
	wantOutcome(t, claimOne(t, store, sale, "a", 1), inventory.OutcomeHeld)
}

// A claim that read "this buyer has nothing" must not overlook a hold granted and confirmed before it wrote.
func TestLimitHoldsAgainstConfirmations(t *testing.T) {
	store := testmysql.Store(t)
	sale := testmysql.Sale(2000).In(t, store)
	var wg sync.WaitGroup
	for b := range 40 {
		buyer := fmt.Sprintf("buyer-%d", b)
		for range 4 {
			wg.Go(func() {
				r := claimOne(t, store, sale, buyer, 1)
				if r.Reservation == nil {
					return
				}
				if _, err := testmysql.Confirm(store, sale.ID, r.Reservation.ID, "pay-"+buyer); err != nil {
					t.Error(err)
				}
			})
		}
	}
	wg.Wait() // the audit checks the limit
}

func TestWindowIsHalfOpenByTheDatabasesClock(t *testing.T) {
	store := testmysql.Store(t)
	for _, tt := range []struct {
		name       string
		start, end time.Duration
		want       inventory.Outcome
	}{
		{"before the start", time.Hour, 0, inventory.OutcomeNotOpen},
		{"without an end", -time.Hour, 0, inventory.OutcomeHeld},
		{"before the end", -time.Hour, time.Hour, inventory.OutcomeHeld},
		{"after the end", -time.Hour, -time.Minute, inventory.OutcomeClosed},
	} {
		t.Run(tt.name, func(t *testing.T) {
			sale := testmysql.Sale(1).Window(tt.start, tt.end).In(t, store)
			wantOutcome(t, claimOne(t, store, sale, "a", 1), tt.want)
		})
	}
	start := time.Date(2026, 11, 27, 10, 0, 0, 0, time.UTC)
	snap := &inventory.Snapshot{Sale: inventory.Sale{StartsAt: start, EndsAt: start.Add(time.Hour)}, LoadedAt: start.Add(-time.Hour)}
	for _, tt := range []struct {
		at   time.Time
		want inventory.Gate
	}{
		{start.Add(-time.Microsecond), inventory.GateNotOpen},
		{start, inventory.GateOpen},
		{start.Add(time.Hour - time.Microsecond), inventory.GateOpen},
		{start.Add(time.Hour), inventory.GateClosed},
	} {
		if got := snap.Gate(tt.at); got != tt.want {
			t.Errorf("gate at %v = %v, want %v", tt.at, got, tt.want)
		}
	}
}

func TestNothingIsGrantedWhileLoading(t *testing.T) {
	store := testmysql.Store(t)
	sale := testmysql.Sale(3).Obj()
	if err := store.Register(ctx, sale); err != nil {
		t.Fatal(err)
	}
	wantOutcome(t, claimOne(t, store, sale, "a", 1), inventory.OutcomeNotOpen)
	if _, err := store.Load(ctx, sale.ID, nil); err != nil {
		t.Fatal(err)
	}
	wantOutcome(t, claimOne(t, store, sale, "a", 1), inventory.OutcomeHeld)
}

func TestASuspendedSaleKeepsHoldsPayable(t *testing.T) {
	store := testmysql.Store(t)
	sale := testmysql.Sale(3).In(t, store)
	first := claimOne(t, store, sale, "a", 1)
	sale.Suspended, sale.Generation = true, 2
	if err := store.Register(ctx, sale); err != nil {
		t.Fatal(err)
	}
	wantOutcome(t, claimOne(t, store, sale, "b", 1), inventory.OutcomeSuspended)
	wantOutcome(t, claimOne(t, store, sale, "a", 1), inventory.OutcomeReplay)
	if _, err := testmysql.Confirm(store, sale.ID, first.Reservation.ID, "pay"); err != nil {
		t.Error(err)
	}
}

func TestConfirmAnswers(t *testing.T) {
	store := testmysql.Store(t)
	sale := testmysql.Sale(10).In(t, store)
	a, b, c := claimOne(t, store, sale, "a", 1), claimOne(t, store, sale, "b", 1), claimOne(t, store, sale, "c", 1)
	if _, err := testmysql.Release(store, sale.ID, c.Reservation.ID); err != nil {
		t.Fatal(err)
	}
	unknown := uuid.New()
	tests := []struct {
		name      string
		r         uuid.UUID
		payment   string
		want      inventory.State
		wantError error
	}{
		{"first", a.Reservation.ID, "pay-a", inventory.Confirmed, nil},
		{"again", a.Reservation.ID, "pay-a", inventory.Confirmed, nil},
		{"with another payment", a.Reservation.ID, "pay-x", 0, inventory.ErrPaymentMismatch},
		{"with a payment used elsewhere", b.Reservation.ID, "pay-a", 0, inventory.ErrPaymentReused},
		{"of a released one, while units are free", c.Reservation.ID, "pay-c", inventory.Confirmed, nil},
		{"of an unknown one", unknown, "pay-d", inventory.RefundDue, nil},
		{"of an unknown one again", unknown, "pay-d", inventory.RefundDue, nil},
		{"with a payment that is due to be refunded", b.Reservation.ID, "pay-d", 0, inventory.ErrPaymentReused},
	}
	check := func(name string, got inventory.Settlement, i int) {
		t.Helper()
		tt := tests[i]
		if !errors.Is(got.Err, tt.wantError) || got.Err == nil && (got.Reservation.State != tt.want || got.Reservation.PaymentID != tt.payment || got.Reservation.ID != tt.r) {
			t.Errorf("%s, confirming %s: %+v, %v; want %v, %v", name, tt.name, got.Reservation, got.Err, tt.want, tt.wantError)
		}
	}
	for i, tt := range tests {
		r, err := testmysql.Confirm(store, sale.ID, tt.r, tt.payment)
		check("one by one", inventory.Settlement{Reservation: r, Err: err}, i)
	}
	// All of them again, in one batch.
	var batch []inventory.Payment
	for _, tt := range tests {
		batch = append(batch, inventory.Payment{Reservation: tt.r, ID: tt.payment})
	}
	answers, err := store.Confirm(ctx, sale.ID, "test", batch)
	if err != nil {
		t.Fatal(err)
	}
	for i := range tests {
		check("in a batch", answers[i], i)
	}
	if _, err := testmysql.Release(store, sale.ID, a.Reservation.ID); !errors.Is(err, inventory.ErrConfirmed) {
		t.Errorf("releasing a confirmed one: %v", err)
	}
}

// Payments that share a batch answer as if they had come one by one.
func TestConfirmOneBatch(t *testing.T) {
	store := testmysql.Store(t)
	sale := testmysql.Sale(10).In(t, store)
	a, b := claimOne(t, store, sale, "a", 1).Reservation.ID, claimOne(t, store, sale, "b", 1).Reservation.ID
	answers, err := store.Confirm(ctx, sale.ID, "test", []inventory.Payment{
		{Reservation: a, ID: "p1"}, {Reservation: a, ID: "p1"}, {Reservation: a, ID: "p2"}, {Reservation: b, ID: "p1"}, {Reservation: b, ID: "p3"}})
	if err != nil {
		t.Fatal(err)
	}
	for i, want := range []error{nil, nil, inventory.ErrPaymentMismatch, inventory.ErrPaymentReused, nil} {
		if !errors.Is(answers[i].Err, want) || want == nil && answers[i].Reservation.State != inventory.Confirmed {
			t.Errorf("answer %d: %+v, want %v", i, answers[i], want)
		}
	}
}

func TestSweepersShareExpiredHolds(t *testing.T) {
	store := testmysql.Store(t)
	sale := testmysql.Sale(600).TTL(time.Second).In(t, store)
	stampede(t, store, sale, 2, buyers(600, 1))
	var mu sync.Mutex
	swept := 0
	testmysql.Eventually(t, "all 600 holds are swept once", func() bool {
		var wg sync.WaitGroup
		for i := range 4 {
			wg.Go(func() {
				n, err := store.Sweep(ctx, sale.ID, fmt.Sprintf("sweep-%d", i), 50)
				if err != nil {
					t.Error(err)
				}
				mu.Lock()
				swept += n
				mu.Unlock()
			})
		}
		wg.Wait()
		return swept >= 600
	})
	snap, err := store.Snapshot(ctx, sale.ID)
	if err != nil {
		t.Fatal(err)
	}
	if swept != 600 || snap.Available != 600 || !snap.NextLapse.IsZero() {
		t.Errorf("swept %d, counts %+v, next lapse %v", swept, snap.Counts, snap.NextLapse)
	}
}

func TestExpiredHoldsAreClaimableWithoutASweeper(t *testing.T) {
	store := testmysql.Store(t)
	sale := testmysql.Sale(2).TTL(time.Second).In(t, store)
	a, b := claimOne(t, store, sale, "a", 1), claimOne(t, store, sale, "b", 1)
	wantOutcome(t, claimOne(t, store, sale, "c", 1), inventory.OutcomeAllHeld)
	testmysql.Eventually(t, "a buyer gets the expired unit", func() bool { return claimOne(t, store, sale, "c", 1).Outcome == inventory.OutcomeHeld })
	again := claimOne(t, store, sale, "a", 1) // its own hold expired as well
	wantOutcome(t, again, inventory.OutcomeHeld)
	if again.Reservation.ID == a.Reservation.ID {
		t.Error("an expired reservation came to life again")
	}
	late, err := testmysql.Confirm(store, sale.ID, b.Reservation.ID, "pay")
	if err != nil || late.State != inventory.RefundDue || late.Reason != inventory.DueSoldOut {
		t.Errorf("confirming an expired hold whose unit is another's: %+v, %v", late, err)
	}
}

func TestAConfirmAndASweepOfOneHoldCannotBothWin(t *testing.T) {
	store := testmysql.Store(t)
	sale := testmysql.Sale(200).TTL(time.Second).RefuseLate().In(t, store)
	results := stampede(t, store, sale, 2, buyers(200, 1))
	var wg sync.WaitGroup
	stop := make(chan struct{})
	for range 2 {
		wg.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				if _, err := store.Sweep(ctx, sale.ID, "sweep", 10); err != nil {
					t.Error(err)
				}
			}
		})
	}
	// Confirmations spread over the moment of expiry.
	var confirms sync.WaitGroup
	for i, r := range results {
		confirms.Go(func() {
			time.Sleep(time.Until(r.Reservation.ExpiresAt.Add(time.Duration(i-100) * time.Millisecond)))
			got, err := testmysql.Confirm(store, sale.ID, r.Reservation.ID, fmt.Sprint("pay-", i))
			if err != nil || got.State != inventory.Confirmed && got.Reason != inventory.DuePolicy {
				t.Errorf("%+v, %v", got, err)
			}
		})
	}
	confirms.Wait()
	close(stop)
	wg.Wait()
	report := testmysql.Audit(t, store, sale.ID)
	if report.Sold == 0 || report.Sold == 200 {
		t.Errorf("%d of 200 were confirmed: the race did not take place", report.Sold)
	}
}

func TestLoadGoesOnWhereItStopped(t *testing.T) {
	store := testmysql.Store(t)
	sale := testmysql.Sale(43_450).Obj()
	if err := store.Register(ctx, sale); err != nil {
		t.Fatal(err)
	}
	stopped, cancel := context.WithCancel(ctx)
	var seen []int64
	_, err := store.Load(stopped, sale.ID, func(loaded, _ int64) {
		seen = append(seen, loaded)
		if len(seen) == 2 {
			cancel()
		}
	})
	if !errors.Is(err, context.Canceled) {
		t.Fatalf("loading was not stopped: %v", err)
	}
	if _, err := store.Load(ctx, sale.ID, func(loaded, _ int64) { seen = append(seen, loaded) }); err != nil {
		t.Fatal(err)
	}
	if want := "[20000 40000 40000 43450]"; fmt.Sprint(seen) != want {
		t.Errorf("progress %v, want %s", seen, want)
	}
	testmysql.Audit(t, store, sale.ID)
}

// Loaders that do not know of each other insert the same rows: each row is there once, and all are counted.
func TestLoadersRunSideBySide(t *testing.T) {
	store := testmysql.Store(t)
	sale := testmysql.Sale(60_001).Obj()
	if err := store.Register(ctx, sale); err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for range 3 {
		wg.Go(func() {
			if n, err := store.Load(ctx, sale.ID, nil); err != nil || n != 60_001 {
				t.Errorf("loaded %d, %v", n, err)
			}
		})
	}
	wg.Wait()
	testmysql.Audit(t, store, sale.ID)
	wantCounts(t, store, sale, 60_001, 0, 0)
}

// A server that restarted, or closed what was idle, leaves a pool of dead connections: nobody is to hear of it.
func TestDeadIdleConnectionsAreNotUsed(t *testing.T) {
	store := testmysql.Store(t)
	sale := testmysql.Sale(20).In(t, store)
	admin := testmysql.Admin(t)
	pool := make([]*sql.Conn, 6)
	ids := make([]int64, len(pool))
	for i := range pool {
		var err error
		if pool[i], err = store.DB().Conn(ctx); err != nil {
			t.Fatal(err)
		}
		if err := pool[i].QueryRowContext(ctx, "SELECT CONNECTION_ID()").Scan(&ids[i]); err != nil {
			t.Fatal(err)
		}
	}
	for i := range pool {
		if err := pool[i].Close(); err != nil { // back into the pool
			t.Fatal(err)
		}
	}
	for _, id := range ids {
		testmysql.Eventually(t, "the connection is gone", func() bool {
			_, err := admin.ExecContext(ctx, fmt.Sprint("KILL ", id))
			var unknown *mysql.MySQLError
			return errors.As(err, &unknown) && unknown.Number == 1094
		})
	}
	claimOne(t, store, sale, "last", 1)
	testmysql.Audit(t, store, sale.ID)
}

// More units than one transaction gives back, and each kind of answer, in one call.
func TestReleaseOfMany(t *testing.T) {
	store := testmysql.Store(t)
	sale := testmysql.Sale(12_001).MaxPerBuyer(inventory.MaxQuantity).In(t, store)
	var ids []uuid.UUID
	for i := range 12 {
		ids = append(ids, claimOne(t, store, sale, fmt.Sprint("buyer-", i), inventory.MaxQuantity).Reservation.ID)
	}
	paid := claimOne(t, store, sale, "paid", 1).Reservation
	confirmAs(t, store, sale, paid, "pay", inventory.Confirmed)
	ids = append(ids, paid.ID, uuid.New(), ids[3])
	answers, err := store.Release(ctx, sale.ID, "desk", ids)
	if err != nil || len(answers) != len(ids) {
		t.Fatalf("%d answers to %d releases, %v", len(answers), len(ids), err)
	}
	for i, a := range answers {
		var want error
		switch i {
		case 12:
			want = inventory.ErrConfirmed
		case 13:
			want = inventory.ErrNotFound
		}
		if !errors.Is(a.Err, want) || want == nil && (a.Reservation.ID != ids[i] || a.Reservation.State != inventory.Released) {
			t.Errorf("release %d was answered with %+v, want error %v", i, a, want)
		}
	}
	wantCounts(t, store, sale, 12_000, 0, 1)
}

func TestCloseSaleWaitsForHolds(t *testing.T) {
	store := testmysql.Store(t)
	sale := testmysql.Sale(1).In(t, store)
	if err := store.CloseSale(ctx, sale.ID); !errors.Is(err, inventory.ErrNotOver) {
		t.Errorf("closing an open sale with units: %v", err)
	}
	r := claimOne(t, store, sale, "a", 1)
	if err := store.CloseSale(ctx, sale.ID); !errors.Is(err, inventory.ErrNotOver) {
		t.Errorf("closing with a live hold: %v", err)
	}
	if _, err := testmysql.Confirm(store, sale.ID, r.Reservation.ID, "pay"); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := store.CloseSale(ctx, sale.ID); err != nil {
			t.Errorf("closing: %v", err)
		}
	}
	wantOutcome(t, claimOne(t, store, sale, "b", 1), inventory.OutcomeClosed)
}

func TestPurgeLeavesOtherSalesAlone(t *testing.T) {
	store := testmysql.Store(t)
	gone := testmysql.Sale(3).Obj()
	stays := testmysql.Sale(3).In(t, store)
	if err := store.Register(ctx, gone); err != nil {
		t.Fatal(err)
	}
	if _, err := store.Load(ctx, gone.ID, nil); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := store.Purge(ctx, gone.ID); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := store.Audit(ctx, gone.ID); !errors.Is(err, inventory.ErrNoSale) {
		t.Errorf("auditing a purged sale: %v", err)
	}
	wantOutcome(t, claimOne(t, store, stays, "a", 1), inventory.OutcomeHeld)
}

// The audit must see what it is there to see: each row breaks one thing by hand.
func TestAuditFindsBrokenRows(t *testing.T) {
	for _, tt := range []struct{ name, breaking, want string }{
		{"unit sold twice", "UPDATE flashsale_unit SET reservation_id = (SELECT reservation_id FROM flashsale_reservation WHERE state = 2 LIMIT 1) WHERE reservation_id = (SELECT reservation_id FROM flashsale_reservation WHERE state = 1 LIMIT 1)", "I2"},
		{"held unit lost", "UPDATE flashsale_unit SET reservation_id = DEFAULT WHERE reservation_id = (SELECT reservation_id FROM flashsale_reservation WHERE state = 1 LIMIT 1)", "I2"},
		{"reservation lists another's unit", "UPDATE flashsale_reservation SET unit_nos = '5' WHERE state = 1", "I2"},
		{"sold unit listed as returned", "INSERT INTO flashsale_returned SELECT u.sale_id, u.unit_no FROM flashsale_unit u JOIN flashsale_reservation r USING (sale_id, reservation_id) WHERE r.state = 2", "I1"},
		{"fresh unit listed as returned", "INSERT INTO flashsale_returned SELECT sale_id, 5 FROM flashsale_sale", "I1"},
		{"more units than declared", "UPDATE flashsale_sale SET units = 1", "I3"},
		{"more units missing than were taken away", "UPDATE flashsale_sale SET removed = removed + 1", "I1"},
		{"unit row missing", "DELETE FROM flashsale_unit WHERE unit_no = 2", "I1"},
		{"returned unit forgotten", "DELETE FROM flashsale_returned", "I1"},
		{"hold outlives its time", "UPDATE flashsale_reservation SET expires_at = expires_at - INTERVAL 1 HOUR WHERE state = 1", "I4"},
		{"hold that cannot lapse", "DELETE FROM flashsale_wave", "I4"},
		{"ledger row of nobody", "INSERT INTO flashsale_ledger (sale_id, payment_id, reservation_id, buyer, quantity, recorded_at) SELECT sale_id, 'x', 0x11111111111111111111111111111111, 'x', 1, UTC_TIMESTAMP(6) FROM flashsale_sale", "I5"},
		{"two live reservations", "UPDATE flashsale_reservation SET buyer = 'c', superseded = state WHERE state <> 1; UPDATE flashsale_reservation SET state = 1 WHERE state = 3", "I6"},
		{"newest reservation lost", "UPDATE flashsale_reservation SET superseded = 1 WHERE state = 1", "I6"},
		{"ledger row missing", "DELETE FROM flashsale_ledger", "I5"},
		{"limit exceeded", "UPDATE flashsale_sale SET highest_limit = 0", "I6"},
		{"buyer's counts off", "UPDATE flashsale_reservation SET bought = bought + 1", "I6"},
		{"counter corrupted", "UPDATE flashsale_tally SET held = held + 1 LIMIT 1", "I8"},
		{"granted before the start", "UPDATE flashsale_sale SET starts_at = starts_at + INTERVAL 1 DAY", "I9"},
		{"granted at the end", "UPDATE flashsale_sale SET ends_at = (SELECT MIN(granted_at) FROM flashsale_reservation)", "I9"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			store := testmysql.Store(t)
			sale := testmysql.Sale(5).Obj()
			if err := store.Register(ctx, sale); err != nil {
				t.Fatal(err)
			}
			if _, err := store.Load(ctx, sale.ID, nil); err != nil {
				t.Fatal(err)
			}
			a, b := claimOne(t, store, sale, "a", 1), claimOne(t, store, sale, "b", 1)
			claimOne(t, store, sale, "c", 1)
			if _, err := testmysql.Confirm(store, sale.ID, a.Reservation.ID, "pay"); err != nil {
				t.Fatal(err)
			}
			if _, err := testmysql.Release(store, sale.ID, b.Reservation.ID); err != nil {
				t.Fatal(err)
			}
			testmysql.Audit(t, store, sale.ID)
			for q := range strings.SplitSeq(tt.breaking, "; ") {
				if _, err := store.DB().ExecContext(ctx, q); err != nil {
					t.Fatal(err)
				}
			}
			report, err := store.Audit(ctx, sale.ID)
			if err != nil {
				t.Fatal(err)
			}
			for _, c := range report.Failed() {
				if c.ID == tt.want && len(c.Breaches) > 0 {
					return
				}
			}
			t.Errorf("the audit did not report %s: %+v", tt.want, report.Checks)
		})
	}
}

// What has happened cannot be edited away, or the audit would call it wrong.
func TestEditsDoNotRewriteThePast(t *testing.T) {
	store := testmysql.Store(t)
	sale := testmysql.Sale(10).MaxPerBuyer(3).Window(-time.Minute, time.Hour).In(t, store)
	wantOutcome(t, claimOne(t, store, sale, "a", 3), inventory.OutcomeHeld)
	edit := func(change func(*inventory.Sale)) *inventory.Snapshot {
		t.Helper()
		sale.Generation++
		change(&sale)
		if err := store.Register(ctx, sale); err != nil {
			t.Fatal(err)
		}
		snap, err := store.Snapshot(ctx, sale.ID)
		if err != nil {
			t.Fatal(err)
		}
		return snap
	}
	if snap := edit(func(s *inventory.Sale) { s.MaxPerBuyer = 1 }); snap.MaxPerBuyer != 1 {
		t.Errorf("the limit is %d", snap.MaxPerBuyer)
	}
	started := sale.StartsAt
	if snap := edit(func(s *inventory.Sale) {
		s.StartsAt = time.Now().Add(time.Hour)
		s.EndsAt = time.Now().Add(2 * time.Hour)
	}); snap.Gate(snap.Now) != inventory.GateOpen || snap.StartsAt.Sub(started).Abs() > time.Microsecond {
		t.Errorf("the start of a sale that had opened moved to %v", snap.StartsAt)
	}
	snap := edit(func(s *inventory.Sale) { s.EndsAt = time.Now().Add(-30 * time.Second) })
	if snap.Gate(snap.Now) != inventory.GateClosed || snap.EndsAt.Before(snap.Now.Add(-time.Second)) {
		t.Errorf("ended at %v, now is %v: want an end at this moment", snap.EndsAt, snap.Now)
	}
	ended := snap.EndsAt
	if snap := edit(func(s *inventory.Sale) { s.EndsAt = time.Now().Add(-time.Hour) }); !snap.EndsAt.Equal(ended) {
		t.Errorf("the end moved from %v to %v", ended, snap.EndsAt)
	}
	if snap := edit(func(s *inventory.Sale) { s.EndsAt = time.Time{} }); snap.Gate(snap.Now) != inventory.GateOpen {
		t.Error("without an end, the sale goes on")
	}
	wantOutcome(t, claimOne(t, store, sale, "b", 1), inventory.OutcomeHeld)
}

// A claim walks past many taken units in slices, and comes through.
func TestAnIdleLineCatchesUp(t *testing.T) {
	store := testmysql.Store(t)
	sale := testmysql.Sale(200_000).MaxPerBuyer(1000).In(t, store)
	idle := inventory.NewLine("idle")
	first, err := store.Claim(ctx, sale.ID, idle, []inventory.Request{{Buyer: "first", Quantity: 1}})
	if err != nil {
		t.Fatal(err)
	}
	wantOutcome(t, first[0], inventory.OutcomeHeld)
	// Another line takes nearly all.
	other := inventory.NewLine("other")
	for left := 199_997; left > 0; {
		var requests []inventory.Request
		for ; left > 0 && len(requests) < 20; left -= min(left, 1000) {
			requests = append(requests, inventory.Request{Buyer: fmt.Sprint("other-", left), Quantity: min(left, 1000)})
		}
		if _, err := store.Claim(ctx, sale.ID, other, requests); err != nil {
			t.Fatal(err)
		}
	}
	testmysql.Eventually(t, "the line gets one of the two that are left", func() bool {
		got, err := store.Claim(ctx, sale.ID, idle, []inventory.Request{{Buyer: "late", Quantity: 1}})
		if err != nil {
			t.Fatal(err)
		}
		if o := got[0].Outcome; o != inventory.OutcomeHeld && o != inventory.OutcomeBusy {
			t.Fatalf("outcome %v while units are available", o)
		}
		return got[0].Outcome == inventory.OutcomeHeld
	})
}

// Hundreds of keys in a statement may make the server walk a small table instead, which would wait for the rows of others.
func TestLargeBatchesWaitForNoOtherRows(t *testing.T) {
	store := testmysql.Store(t)
	for _, table := range []string{"unit", "returned", "reservation"} { // which look empty to the optimizer, as at the start
		if _, err := store.DB().ExecContext(ctx, "ALTER TABLE flashsale_"+table+" STATS_PERSISTENT=1, STATS_AUTO_RECALC=0"); err != nil {
			t.Fatal(err)
		}
	}
	sale := testmysql.Sale(1700).MaxPerBuyer(inventory.MaxQuantity).In(t, store)
	returned := claimOne(t, store, sale, "returned", 600)
	if _, err := testmysql.Release(store, sale.ID, returned.Reservation.ID); err != nil {
		t.Fatal(err)
	}
	all := buyers(700, 1)
	line := inventory.NewLine("line")
	held, err := store.Claim(ctx, sale.ID, line, all) // takes what was returned, and some
	if err != nil {
		t.Fatal(err)
	}
	if _, err := store.Release(ctx, sale.ID, "desk", reservationIDs(held[400:])); err != nil {
		t.Fatal(err)
	}
	others, err := store.DB().BeginTx(ctx, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = others.Rollback() }()
	if _, err := others.ExecContext(ctx, "SET SESSION wait_timeout = 600"); err != nil {
		t.Fatal(err)
	}
	if n := scan(t, others, "SELECT unit_no FROM flashsale_returned WHERE sale_id = ? ORDER BY unit_no DESC LIMIT 3 FOR UPDATE", sale.ID[:]); n != 3 {
		t.Fatalf("%d returned units are locked", n)
	}
	for _, r := range slices.Concat(held[300:310], held[699:]) {
		if n := scan(t, others, "SELECT reservation_id FROM flashsale_reservation WHERE sale_id = ? AND reservation_id = ? FOR UPDATE", sale.ID[:], r.Reservation.ID[:]); n != 1 {
			t.Fatalf("%d reservations are locked", n)
		}
	}
	soon, cancel := context.WithTimeout(ctx, 10*time.Second) // of the three that each lock is waited for, ten times
	defer cancel()
	payments := make([]inventory.Payment, 300)
	for i := range payments {
		payments[i] = inventory.Payment{Reservation: held[i].Reservation.ID, ID: fmt.Sprint("pay-", i)}
	}
	again, err := store.Claim(soon, sale.ID, line, all[:300])
	if n := count(again); err != nil || n[inventory.OutcomeReplay] != 300 {
		t.Errorf("claiming again: %v, %v", n, err)
	}
	more, err := store.Claim(soon, sale.ID, line, buyers(950, 1)[700:])
	if n := count(more); err != nil || n[inventory.OutcomeHeld] != 250 {
		t.Errorf("claiming returned units: %v, %v", n, err)
	}
	if _, err := store.Confirm(soon, sale.ID, "desk", payments); err != nil {
		t.Errorf("confirming: %v", err)
	}
	if _, err := store.Release(soon, sale.ID, "desk", reservationIDs(held[310:400])); err != nil {
		t.Errorf("releasing: %v", err)
	}
}

func reservationIDs(results []inventory.Result) []uuid.UUID {
	ids := make([]uuid.UUID, len(results))
	for i, r := range results {
		ids[i] = r.Reservation.ID
	}
	return ids
}
