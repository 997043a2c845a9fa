// Package controllers runs FlashSale objects: it looks, lets package plan decide, acts, and writes the status once.
package controllers

import (
	"context"
	"fmt"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/tools/events"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/predicate"

	sales "flashsale.dev/operator/api/v1alpha1"
	"flashsale.dev/operator/controllers/plan"
)

// +kubebuilder:rbac:groups=sales.flashsale.dev,resources=flashsales,verbs=get;list;watch;patch
// +kubebuilder:rbac:groups=sales.flashsale.dev,resources=flashsales/status,verbs=patch
// +kubebuilder:rbac:groups=apps,resources=deployments,verbs=get;list;watch;create;patch;delete
// +kubebuilder:rbac:groups="",resources=services,verbs=get;list;watch;create;patch;delete
// +kubebuilder:rbac:groups=autoscaling,resources=horizontalpodautoscalers,verbs=get;list;watch;create;patch;delete
// +kubebuilder:rbac:groups=policy,resources=poddisruptionbudgets,verbs=get;list;watch;create;patch;delete
// +kubebuilder:rbac:groups=networking.k8s.io,resources=networkpolicies;ingresses,verbs=get;list;watch;create;patch;delete
// +kubebuilder:rbac:groups=gateway.networking.k8s.io,resources=httproutes,verbs=get;list;watch;create;patch;delete
// +kubebuilder:rbac:groups="",resources=pods,verbs=get;list;watch
// +kubebuilder:rbac:groups="",resources=secrets,verbs=get;create;update;delete
// +kubebuilder:rbac:groups=events.k8s.io,resources=events,verbs=create;patch

// FlashSaleReconciler takes sales through their life.
type FlashSaleReconciler struct {
	client.Client
	// Direct reads from the API server, past the cache: Secrets, which are not to be listed or watched, and names about to be
	// taken.
	Direct    client.Reader
	Events    events.EventRecorder
	Databases *Databases
	// Namespace is the operator's own; empty outside of a cluster. No sale may be beside the operator: deleted with it, it
	// could not drain.
	Namespace string
	// Clock is the controller's; nil is the machine's.
	Clock func() time.Time
	// HTTPRoutes says that the cluster has the Gateway API.
	HTTPRoutes bool
	// Image of the reservation pods where the spec names none: the operator's own.
	Image string

	applied appliedChildren
}

// SetupWithManager registers the reconciler.
func (r *FlashSaleReconciler) SetupWithManager(mgr ctrl.Manager) error {
	c := ctrl.NewControllerManagedBy(mgr).
		For(&sales.FlashSale{}, builder.WithPredicates(predicate.Or(
			predicate.GenerationChangedPredicate{}, predicate.AnnotationChangedPredicate{}))).
		WithOptions(controller.Options{MaxConcurrentReconciles: 10})
	for o := range Cached(r.HTTPRoutes) {
		c = c.Watches(o, handler.EnqueueRequestsFromMapFunc(saleOfChild))
	}
	return c.Complete(r)
}

// scope is one pass over one sale.
type scope struct {
	*FlashSaleReconciler
	sale     *sales.FlashSale // as read; its status is replaced at the end of the pass
	database *database        // nil while the Secret cannot be used
	seen     plan.Observed
	now      time.Time
	decision plan.Decision
}

// maxSteps bounds the database work of one pass; a sale that needs more comes back.
const maxSteps = 8

// Reconcile makes one pass.
func (r *FlashSaleReconciler) Reconcile(ctx context.Context, request ctrl.Request) (ctrl.Result, error) {
	s := &scope{FlashSaleReconciler: r, sale: &sales.FlashSale{}}
	if err := r.Get(ctx, request.NamespacedName, s.sale); err != nil {
		if apierrors.IsNotFound(err) {
			r.Databases.Release(request.NamespacedName)
		}
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	if !controllerutil.ContainsFinalizer(s.sale, sales.Finalizer) && !s.beside() {
		if !s.sale.DeletionTimestamp.IsZero() {
			return ctrl.Result{}, nil // others' finalizers hold it
		}
		if err := r.setFinalizer(ctx, s.sale, true); err != nil {
			return ctrl.Result{}, client.IgnoreNotFound(err)
		}
	}

	// Look and decide, and do the database's part step by step.
	s.observe(ctx)
	for step := 0; ; step++ {
		s.decide()
		if s.decision.Work == plan.WorkNone || step == maxSteps || ctx.Err() != nil {
			break
		}
		more := s.work(ctx)
		if more {
			s.observe(ctx)
		}
		if !more || s.decision.Work.Long() { // other sales have a turn
			s.decide()
			break
		}
	}
	s.applyChildren(ctx)
	if err := s.writeStatus(ctx); err != nil {
		if apierrors.IsConflict(err) {
			return ctrl.Result{RequeueAfter: 100 * time.Millisecond}, nil // the cache is behind
		}
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	if s.decision.Finish {
		r.Databases.Release(request.NamespacedName)
		s.forgetKeys()
		return ctrl.Result{}, client.IgnoreNotFound(r.setFinalizer(ctx, s.sale, false))
	}
	if s.decision.Work != plan.WorkNone { // more to do at once
		return ctrl.Result{RequeueAfter: max(s.decision.Wake, time.Millisecond)}, nil
	}
	return ctrl.Result{RequeueAfter: s.decision.Wake}, nil
}

func (s *scope) decide() { s.decision = plan.Decide(s.sale.Spec, s.seen, s.now) }

func (r *FlashSaleReconciler) setFinalizer(ctx context.Context, sale *sales.FlashSale, present bool) error {
	before := sale.DeepCopy()
	if present {
		controllerutil.AddFinalizer(sale, sales.Finalizer)
	} else {
		controllerutil.RemoveFinalizer(sale, sales.Finalizer)
	}
	// The lock keeps finalizers that others add at the same moment.
	patch := client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{})
	if err := r.Patch(ctx, sale, patch); err != nil {
		return fmt.Errorf("writing the finalizer: %w", err)
	}
	return nil
}
