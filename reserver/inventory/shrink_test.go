package inventory_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"

	"flashsale.dev/operator/reserver/inventory"
	"flashsale.dev/operator/test/testmysql"
)

// put registers and loads a sale, and audits it at the end of the test.
func put(t testing.TB, store *inventory.Store, sale inventory.Sale) inventory.Sale {
	t.Helper()
	if err := store.Register(ctx, sale); err != nil {
		t.Fatal(err)
	}
	if _, err := store.Load(ctx, sale.ID, nil); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { testmysql.Audit(t, store, sale.ID) })
	return sale
}

// resize edits the sale to have so many units, and does what the manager does then.
func resize(t testing.TB, store *inventory.Store, sale *inventory.Sale, units int64) *inventory.Snapshot {
	t.Helper()
	sale.Units, sale.Generation = units, sale.Generation+1
	if err := store.Register(ctx, *sale); err != nil {
		t.Fatal(err)
	}
	return shrinkAgain(t, store, *sale)
}

func shrinkAgain(t testing.TB, store *inventory.Store, sale inventory.Sale) *inventory.Snapshot {
	t.Helper()
	if err := store.Shrink(ctx, sale.ID, sale.Units, sale.Generation); err != nil {
		t.Fatal(err)
	}
	testmysql.Audit(t, store, sale.ID)
	return wantLoaded(t, store, sale, -1, -1)
}

// wantLoaded wants that many units loaded of that many; -1 stands for any number.
func wantLoaded(t testing.TB, store *inventory.Store, sale inventory.Sale, loaded, units int64) *inventory.Snapshot {
	t.Helper()
	snap, err := store.Snapshot(ctx, sale.ID)
	if err != nil {
		t.Fatal(err)
	}
	if loaded >= 0 && (snap.Loaded != loaded || snap.Units != units) {
		t.Errorf("%d of %d units are loaded, want %d of %d", snap.Loaded, snap.Units, loaded, units)
	}
	return snap
}

// sellOut claims and pays until nothing is left, on lines that go on, and wants no unit to be sold twice.
func sellOut(t testing.TB, store *inventory.Store, sale inventory.Sale, lines ...*inventory.Line) {
	t.Helper()
	sold := map[int64]bool{}
	for i := 0; ; i++ {
		snap := wantLoaded(t, store, sale, -1, -1)
		if snap.Available == 0 {
			break
		}
		if i == 10_000 {
			t.Fatalf("and still %d units are available", snap.Available)
		}
		results, err := store.Claim(ctx, sale.ID, lines[i%len(lines)], []inventory.Request{{Buyer: uuid.NewString(), Quantity: 1}, {Buyer: uuid.NewString(), Quantity: 1}})
		if err != nil {
			t.Fatal(err)
		}
		for _, r := range results {
			switch r.Outcome {
			case inventory.OutcomeHeld:
				if sold[r.Reservation.Units[0]] {
					t.Errorf("unit %d was sold twice", r.Reservation.Units[0])
				}
				sold[r.Reservation.Units[0]] = true
				confirmAs(t, store, sale, r.Reservation, r.Reservation.ID.String(), inventory.Confirmed)
			case inventory.OutcomeAllHeld, inventory.OutcomeSoldOut:
			default:
				t.Fatalf("outcome %v with %d units available", r.Outcome, snap.Available)
			}
		}
	}
}

func TestShrinkBeforeLoading(t *testing.T) {
	store := testmysql.Store(t)
	sale := testmysql.Sale(100).Obj()
	if err := store.Register(ctx, sale); err != nil {
		t.Fatal(err)
	}
	if snap := resize(t, store, &sale, 40); snap.Units != 40 || snap.Loaded != 0 || !snap.LoadedAt.IsZero() {
		t.Errorf("%d of %d units loaded, at %v", snap.Loaded, snap.Units, snap.LoadedAt)
	}
	put(t, store, sale)
	if snap := wantLoaded(t, store, sale, 40, 40); snap.LoadedAt.IsZero() {
		t.Error("loading did not end")
	}
	sellOut(t, store, sale, inventory.NewLine("line"))
	wantCounts(t, store, sale, 0, 0, 40)
}

// Half of the units are there, and the sale shrinks to them or to fewer: it is loaded then.
func TestShrinkWhileHalfIsLoaded(t *testing.T) {
	store := testmysql.Store(t)
	for _, units := range []int64{30_000, 20_000, 7} {
		sale := testmysql.Sale(50_000).Obj()
		if err := store.Register(ctx, sale); err != nil {
			t.Fatal(err)
		}
		stopped, cancel := context.WithCancel(ctx)
		if _, err := store.Load(stopped, sale.ID, func(int64, int64) { cancel() }); !errors.Is(err, context.Canceled) {
			t.Fatalf("loading was not stopped: %v", err)
		}
		snap := resize(t, store, &sale, units)
		if snap.Units != units || snap.Loaded != min(units, 20_000) || snap.LoadedAt.IsZero() != (units > 20_000) {
			t.Errorf("%d of %d units loaded, at %v", snap.Loaded, snap.Units, snap.LoadedAt)
		}
		put(t, store, sale)
		wantLoaded(t, store, sale, units, units)
	}
}

// Two transactions have inserted units that are not wanted any more when they count them.
func TestShrinkBesideALoader(t *testing.T) {
	store := testmysql.Store(t)
	sale := testmysql.Sale(60_000).Obj()
	if err := store.Register(ctx, sale); err != nil {
		t.Fatal(err)
	}
	_, release := blocked(t, store, sale, "load", "shrink")
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := store.Shrink(ctx, sale.ID, 15_000, 1); err != nil {
			t.Error(err)
		}
	})
	testmysql.Eventually(t, "Shrink waits for the loader's count", func() bool {
		return testmysql.Running(t, store, "/* flashsale shrink */ SELECT available") != 0
	})
	wg.Go(func() {
		if n, err := store.Load(ctx, sale.ID, nil); err != nil || n != 15_000 {
			t.Errorf("loaded %d, %v", n, err)
		}
	})
	testmysql.Eventually(t, "a loader waits to count", func() bool {
		return testmysql.Running(t, store, "/* flashsale load */ UPDATE flashsale_tally") != 0
	})
	release()
	wg.Wait()
	wantLoaded(t, store, sale, 15_000, 15_000)
	testmysql.Audit(t, store, sale.ID)

	// However they meet.
	for range 10 {
		sale := testmysql.Sale(60_000).Obj()
		if err := store.Register(ctx, sale); err != nil {
			t.Fatal(err)
		}
		for range 2 {
			wg.Go(func() {
				if _, err := store.Load(ctx, sale.ID, nil); err != nil {
					t.Error(err)
				}
			})
		}
		time.Sleep(rand.N(400 * time.Millisecond))
		if err := store.Shrink(ctx, sale.ID, 22_222, 1); err != nil {
			t.Error(err)
		}
		wg.Wait()
		if snap := wantLoaded(t, store, sale, 22_222, 22_222); snap.LoadedAt.IsZero() {
			t.Error("loading did not end")
		}
		testmysql.Audit(t, store, sale.ID)
	}
}

func TestShrinkStopsAtWhatIsHeldAndSold(t *testing.T) {
	store := testmysql.Store(t)
	sale := testmysql.Sale(20).In(t, store)
	claimed := stampede(t, store, sale, 1, buyers(15, 1))
	for i, r := range claimed[:6] {
		confirmAs(t, store, sale, r.Reservation, fmt.Sprint("pay-", i), inventory.Confirmed)
	}
	release := func(some []inventory.Result) {
		t.Helper()
		if _, err := store.Release(ctx, sale.ID, "desk", reservationIDs(some)); err != nil {
			t.Fatal(err)
		}
	}
	release(claimed[11:]) // 6 sold, 5 held, 4 returned, 5 fresh
	for _, step := range []struct{ units, loaded, available int64 }{
		{18, 18, 7}, // fresh ones
		{13, 13, 2}, // the other fresh ones, and two of those that came back
		{3, 11, 0},
	} {
		if snap := resize(t, store, &sale, step.units); snap.Units != step.loaded || snap.Loaded != step.loaded || snap.Available != step.available || snap.LoadedAt.IsZero() {
			t.Errorf("shrunk to %d: %+v", step.units, snap)
		}
	}
	wantOutcome(t, claimOne(t, store, sale, "late", 1), inventory.OutcomeAllHeld)
	release(claimed[6:8])
	if snap := shrinkAgain(t, store, sale); snap.Units != 9 || snap.Held != 3 || snap.Sold != 6 {
		t.Errorf("after releases: %+v", snap)
	}
	// A hold that lapsed is held until it is swept.
	for _, table := range []string{"reservation SET expires_at", "wave SET lapses_at"} {
		if _, err := store.DB().ExecContext(ctx, "UPDATE flashsale_"+table+" = UTC_TIMESTAMP(6) WHERE sale_id = ?", sale.ID[:]); err != nil {
			t.Fatal(err)
		}
	}
	if snap := shrinkAgain(t, store, sale); snap.Units != 9 {
		t.Errorf("with holds that lapsed: %+v", snap)
	}
	lapse(t, store, sale, claimed[8].Reservation)
	if snap := shrinkAgain(t, store, sale); snap.Units != 6 || snap.Sold != 6 {
		t.Errorf("after the sweep: %+v", snap)
	}
	// The units of the reservation that is paid late are gone, and there are no others.
	if got := confirmAs(t, store, sale, claimed[8].Reservation, "late", inventory.RefundDue); got.Reason != inventory.DueSoldOut {
		t.Errorf("reason %q", got.Reason)
	}
	// A refund puts units back that are not wanted any more.
	if _, err := store.Refund(ctx, sale.ID, claimed[0].Reservation.ID, "desk", true); err != nil {
		t.Fatal(err)
	}
	if snap := shrinkAgain(t, store, sale); snap.Units != 5 || snap.Available != 0 || snap.Sold != 5 {
		t.Errorf("after the refund: %+v", snap)
	}
}

func TestShrinkToWhatIsSoldIsSoldOut(t *testing.T) {
	store := testmysql.Store(t)
	sale := testmysql.Sale(10).In(t, store)
	for i, r := range stampede(t, store, sale, 1, buyers(4, 1)) {
		confirmAs(t, store, sale, r.Reservation, fmt.Sprint("pay-", i), inventory.Confirmed)
	}
	soldOut := func() time.Time {
		t.Helper()
		at, err := store.SoldOutAt(ctx, sale.ID)
		if err != nil {
			t.Fatal(err)
		}
		return at
	}
	if err := store.CloseSale(ctx, sale.ID); !errors.Is(err, inventory.ErrNotOver) || !soldOut().IsZero() {
		t.Fatalf("closing: %v; sold out at %v", err, soldOut())
	}
	resize(t, store, &sale, 4)
	if soldOut().IsZero() {
		t.Error("not sold out")
	}
	wantOutcome(t, claimOne(t, store, sale, "late", 1), inventory.OutcomeSoldOut)
	if err := store.CloseSale(ctx, sale.ID); err != nil {
		t.Fatal(err)
	}
	var events int
	if err := store.DB().QueryRowContext(ctx, "SELECT COUNT(*) FROM flashsale_outbox WHERE kind = 7").Scan(&events); err != nil || events != 1 {
		t.Errorf("%d events of the sale being sold out, %v", events, err)
	}
}

// Units are taken away below and above the others, and more are wanted then: they have new numbers, and all are found.
func TestGrowAfterShrink(t *testing.T) {
	store := testmysql.Store(t)
	sale := testmysql.Sale(50).In(t, store)
	lines := []*inventory.Line{inventory.NewLine("a"), inventory.NewLine("b")}
	var held []inventory.Result
	for i := range 12 { // the lines hope for more
		results, err := store.Claim(ctx, sale.ID, lines[i%2], []inventory.Request{{Buyer: fmt.Sprint("buyer-", i), Quantity: 1}})
		if err != nil {
			t.Fatal(err)
		}
		held = append(held, results...)
	}
	loadedAt := wantLoaded(t, store, sale, 50, 50).LoadedAt
	if _, err := store.Release(ctx, sale.ID, "desk", reservationIDs(held[:7])); err != nil {
		t.Fatal(err)
	}
	if snap := resize(t, store, &sale, 9); snap.Loaded != 9 || snap.Available != 4 { // no fresh ones, and 3 of those that came back
		t.Fatalf("shrunk to 9: %+v", snap)
	}
	grow := func(units int64) {
		t.Helper()
		resize(t, store, &sale, units)
		if _, err := store.Load(ctx, sale.ID, nil); err != nil {
			t.Fatal(err)
		}
		if snap := wantLoaded(t, store, sale, units, units); !snap.LoadedAt.Equal(loadedAt) {
			t.Errorf("loaded at %v, before at %v", snap.LoadedAt, loadedAt)
		}
	}
	grow(30)
	sellOut(t, store, sale, lines...)
	wantCounts(t, store, sale, 0, 5, 25)
	if snap := resize(t, store, &sale, 20); snap.Units != 30 {
		t.Errorf("shrunk below what is held and sold: %+v", snap)
	}
	grow(60_000) // more than a scan walks
	resize(t, store, &sale, 40)
	grow(50)
	sellOut(t, store, sale, inventory.NewLine("c"), lines[0], lines[1])
	wantCounts(t, store, sale, 0, 5, 45)
	var highest int
	if err := store.DB().QueryRowContext(ctx, "SELECT MAX(unit_no) FROM flashsale_unit").Scan(&highest); err != nil || highest != 60_051 {
		t.Errorf("the highest unit is %d, %v; want 50 - 41 + 21 before, to 60,041, and 10 after", highest, err)
	}
}

// As in a sale that has not shrunk: what somebody leaves behind is looked for, from the first unit on.
func TestUnitsBehindTheStartAreFoundAfterShrink(t *testing.T) {
	store := testmysql.Store(t)
	sale := testmysql.Sale(20).In(t, store)
	resize(t, store, &sale, 10)
	tx, err := store.DB().BeginTx(ctx, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback() }()
	scan(t, tx, inventory.FreshUnitsSQL, sale.ID[:], 1, 11, 4)
	line := inventory.NewLine("line")
	held, err := store.Claim(ctx, sale.ID, line, buyers(6, 1))
	if n := count(held)[inventory.OutcomeHeld]; err != nil || n != 6 {
		t.Fatalf("%d of the 6 unlocked units were granted, %v", n, err)
	}
	if err := tx.Rollback(); err != nil {
		t.Fatal(err)
	}
	held, err = store.Claim(ctx, sale.ID, line, buyers(10, 1)[6:])
	if n := count(held)[inventory.OutcomeHeld]; err != nil || n != 4 {
		t.Errorf("%d of the 4 units left behind were granted, %v", n, err)
	}
}

func TestShrinkIsFenced(t *testing.T) {
	store := testmysql.Store(t)
	sale := testmysql.Sale(10).Obj()
	sale.Generation = 5
	put(t, store, sale)
	for _, tt := range []struct{ units, generation, want int64 }{
		{3, 4, 10},   // of a manager that was paused
		{12, 5, 10},  // it makes none
		{10, 5, 10},  // nothing to do
		{8, 5, 8},    // the spec of the row
		{6, 6, 6},    // of a newer one
		{1, 5, 1},    // which does not write the generation
		{0, 4, 1},    //
		{1, 1000, 1}, // again
	} {
		if err := store.Shrink(ctx, sale.ID, tt.units, tt.generation); err != nil {
			t.Fatal(err)
		}
		wantLoaded(t, store, sale, tt.want, tt.want)
	}
	stale := sale
	stale.Units, stale.Generation = 100, 4
	if err := store.Register(ctx, stale); err != nil {
		t.Fatal(err)
	}
	wantLoaded(t, store, sale, 1, 1)
	closed := testmysql.Sale(10).In(t, store)
	endNow(t, store, &closed)
	if err := store.CloseSale(ctx, closed.ID); err != nil {
		t.Fatal(err)
	}
	resize(t, store, &closed, 4)
	wantLoaded(t, store, closed, 10, 10)
	if err := store.Shrink(ctx, uuid.New(), 1, 1); !errors.Is(err, inventory.ErrNoSale) {
		t.Errorf("shrinking no sale: %v", err)
	}
}

// It dies with everything written, and nothing has happened.
func TestShrinkIsKilled(t *testing.T) {
	store := testmysql.Store(t)
	sale := testmysql.Sale(10).In(t, store)
	connection, release := blocked(t, store, sale, "shrink", "shrink")
	failed := make(chan error, 1)
	go func() { failed <- store.Shrink(ctx, sale.ID, 4, 1) }()
	if _, err := testmysql.Admin(t).ExecContext(ctx, fmt.Sprint("KILL ", connection())); err != nil {
		t.Fatal(err)
	}
	if err := <-failed; inventory.Classify(err) != inventory.Unavailable {
		t.Errorf("the killed Shrink gave %v", err)
	}
	release()
	wantLoaded(t, store, sale, 10, 10)
	testmysql.Audit(t, store, sale.ID)
	shrinkAgain(t, store, inventory.Sale{ID: sale.ID, Units: 4, Generation: 1})
	wantLoaded(t, store, sale, 4, 4)
}

// Each transaction is small, and what was done stays when the work is interrupted.
func TestShrinkOfManyUnits(t *testing.T) {
	dsn := testmysql.DSN(t)
	var mu sync.Mutex
	transactions, longest := 0, time.Duration(0)
	var interrupt func()
	store, err := inventory.Open(inventory.Options{DSN: dsn, OnHold: func(caller string, d time.Duration) {
		mu.Lock()
		defer mu.Unlock()
		if caller == "shrink" {
			transactions++
			longest = max(longest, d)
			if transactions == 5 {
				interrupt()
			}
		}
	}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = store.Close() })
	if _, err := store.Setup(ctx); err != nil {
		t.Fatal(err)
	}
	sale := testmysql.Sale(230_000).MaxPerBuyer(inventory.MaxQuantity).In(t, store)
	for i := range 12 { // some of which come back
		r := claimOne(t, store, sale, fmt.Sprint("buyer-", i), inventory.MaxQuantity)
		if i%2 == 0 {
			if _, err := testmysql.Release(store, sale.ID, r.Reservation.ID); err != nil {
				t.Fatal(err)
			}
		}
	}
	stopped, cancel := context.WithCancel(ctx)
	interrupt = cancel
	if err := store.Shrink(stopped, sale.ID, 30_000, 1); !errors.Is(err, context.Canceled) {
		t.Fatalf("not interrupted: %v", err)
	}
	wantLoaded(t, store, sale, 205_000, 205_000)
	testmysql.Audit(t, store, sale.ID)
	shrinkAgain(t, store, inventory.Sale{ID: sale.ID, Units: 30_000, Generation: 1})
	wantLoaded(t, store, sale, 30_000, 30_000)
	t.Logf("%d transactions, the longest of %v", transactions, longest)
	if transactions < 200_000/5_000 {
		t.Errorf("%d transactions", transactions)
	}
	shrinkAgain(t, store, inventory.Sale{ID: sale.ID, Units: 1, Generation: 1})
	wantLoaded(t, store, sale, 6_000, 6_000) // what is held
}

// The sale shrinks and grows while everything else goes on.
func TestShrinkBesideEverything(t *testing.T) {
	const lines = 3
	store := testmysql.Store(t)
	sale := testmysql.Sale(3000).MaxPerBuyer(3).TTL(700*time.Millisecond).In(t, store)
	stop := make(chan struct{})
	going := func() bool {
		select {
		case <-stop:
			return false
		default:
			return true
		}
	}
	var wg sync.WaitGroup
	var mu sync.Mutex
	outcomes := map[inventory.Outcome]int{}
	for l := range lines {
		wg.Go(func() {
			line := inventory.NewLine(fmt.Sprint("line-", l))
			for round := 0; going(); round++ {
				requests := make([]inventory.Request, 20)
				for i := range requests {
					requests[i] = inventory.Request{Buyer: fmt.Sprintf("buyer-%d-%d-%d", l, round, i), Quantity: 1 + i%3}
				}
				results, err := store.Claim(ctx, sale.ID, line, requests)
				if err != nil {
					t.Errorf("claiming: %v", err)
					return
				}
				mu.Lock()
				for _, r := range results {
					outcomes[r.Outcome]++
				}
				mu.Unlock()
				var payments []inventory.Payment
				var unwanted []uuid.UUID
				for i, r := range results {
					switch {
					case r.Reservation == nil:
					case i%10 == 0: // few, so that the sale does not sell out
						payments = append(payments, inventory.Payment{Reservation: r.Reservation.ID, ID: r.Reservation.ID.String()})
					case i%3 == 0: // the others lapse
						unwanted = append(unwanted, r.Reservation.ID)
					}
				}
				if len(payments) > 0 {
					answers, err := store.Confirm(ctx, sale.ID, fmt.Sprint("line-", l), payments)
					if err != nil {
						t.Errorf("confirming: %v", err)
					}
					for _, a := range answers {
						if a.Err != nil && !errors.Is(a.Err, inventory.ErrBusy) {
							t.Errorf("confirming: %v", a.Err)
						}
					}
				}
				if _, err := store.Release(ctx, sale.ID, fmt.Sprint("line-", l), unwanted); err != nil {
					t.Errorf("releasing: %v", err)
				}
			}
		})
	}
	wg.Go(func() {
		for going() {
			if _, err := store.Sweep(ctx, sale.ID, "sweeper", 500); err != nil {
				t.Errorf("sweeping: %v", err)
			}
			time.Sleep(10 * time.Millisecond)
		}
	})
	for _, units := range []int64{2500, 2600, 1500, 900, 3500, 2000, 1000, 1200, 600} {
		resize(t, store, &sale, units)
		if _, err := store.Load(ctx, sale.ID, nil); err != nil {
			t.Errorf("loading: %v", err)
		}
		time.Sleep(200 * time.Millisecond)
		shrinkAgain(t, store, sale)
	}
	close(stop)
	wg.Wait()
	t.Logf("outcomes %v", outcomes)
	for o := range outcomes {
		switch o {
		case inventory.OutcomeHeld, inventory.OutcomeAllHeld, inventory.OutcomeSoldOut, inventory.OutcomeBusy:
		default:
			t.Errorf("outcome %v", o)
		}
	}
	testmysql.Eventually(t, "holds lapsed", func() bool {
		if _, err := store.Sweep(ctx, sale.ID, "sweeper", 500); err != nil {
			t.Fatal(err)
		}
		return wantLoaded(t, store, sale, -1, -1).Held == 0
	})
	snap := shrinkAgain(t, store, sale)
	if want := max(snap.Sold, sale.Units); snap.Units != want || snap.Loaded != want {
		t.Errorf("%d of %d units, %d sold, %d wanted", snap.Loaded, snap.Units, snap.Sold, sale.Units)
	}
	resize(t, store, &sale, snap.Units+100)
	if _, err := store.Load(ctx, sale.ID, nil); err != nil {
		t.Fatal(err)
	}
	sellOut(t, store, sale, inventory.NewLine("last"))
	wantCounts(t, store, sale, 0, 0, sale.Units)
}

// The counts went wrong in a sale that has shrunk.
func TestRepairAfterShrink(t *testing.T) {
	store := testmysql.Store(t)
	sale := testmysql.Sale(30).In(t, store)
	stampede(t, store, sale, 1, buyers(5, 1))
	resize(t, store, &sale, 12)
	for _, q := range []string{
		"UPDATE flashsale_tally SET available = available + 4 WHERE line = 'shrink'",
		"UPDATE flashsale_tally SET available = available - 9 WHERE line = 'load'",
		"UPDATE flashsale_tally SET held = held + 1 WHERE line = 'line-0'",
	} {
		if _, err := store.DB().ExecContext(ctx, q); err != nil {
			t.Fatal(err)
		}
	}
	changed, err := store.Repair(ctx, sale.ID)
	if want := (inventory.Counts{Available: 5, Held: -1}); err != nil || changed != want {
		t.Errorf("the repair changed %+v, %v; want %+v", changed, err, want)
	}
	testmysql.Audit(t, store, sale.ID)
	resize(t, store, &sale, 20)
	if _, err := store.Load(ctx, sale.ID, nil); err != nil {
		t.Fatal(err)
	}
	wantLoaded(t, store, sale, 20, 20)
	sellOut(t, store, sale, inventory.NewLine("line"))
	wantCounts(t, store, sale, 0, 5, 15)
}
